"""Reading data sets in a subprocess: errors keep their cause."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from common.data import sources
from common.system.causes import Cause
from common.system.errors import UserError

CAUSES = [
    (MemoryError(), Cause.OUT_OF_MEMORY),
    (OSError(errno.ENOSPC, "x"), Cause.DISK_FULL),
    (UserError("x", cause=Cause.DAMAGED_DATA), Cause.DAMAGED_DATA),
    (ValueError("a damaged file"), Cause.OTHER),
    (ConnectionResetError("by a mirror"), Cause.OTHER),
]


@pytest.mark.parametrize("error, cause", CAUSES)
def test_an_error_in_the_subprocess_keeps_its_cause(error: Exception, cause: Cause) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(UserError) as caught:
        sources.call_in_subprocess(fail)
    assert caught.value.cause is cause


def test_a_killed_subprocess_may_have_run_out_of_memory() -> None:
    with pytest.raises(UserError, match="was killed; the machine may have run out of memory") as caught:
        sources.call_in_subprocess(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert caught.value.cause is Cause.OUT_OF_MEMORY


def test_the_output_of_a_subprocess_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    sources.call_in_subprocess(lambda: print("read 7 files"))
    assert capfd.readouterr().out == "read 7 files\n"


def test_generated_images_that_exceed_the_memory_are_refused() -> None:
    with pytest.raises(UserError, match=r"MB of memory are available; lower data\.samples or data\.image_size"):
        sources.generate_images(10_000_000, 1024, 10, 0)


def test_a_file_in_place_of_the_cache_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.touch()
    with pytest.raises(UserError, match="cache is a file; choose another folder"), sources.hold_folder_lock(file):
        pass
