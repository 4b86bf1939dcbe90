"""Calls in a forked process: errors keep their cause, and output is not lost."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from common.data.subprocess_call import call_in_subprocess
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
        call_in_subprocess(fail)
    assert caught.value.cause is cause


def test_a_killed_subprocess_may_have_run_out_of_memory() -> None:
    with pytest.raises(UserError, match="was killed; the machine may have run out of memory") as caught:
        call_in_subprocess(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert caught.value.cause is Cause.OUT_OF_MEMORY


def test_the_output_of_a_subprocess_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    call_in_subprocess(lambda: print("read 7 files"))
    assert capfd.readouterr().out == "read 7 files\n"
