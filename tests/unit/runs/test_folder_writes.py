"""Files of run folders are written atomically, with a clear message if the disk cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.folder import write_atomic
from common.system.errors import UserError
from tests.harness.environment.read_only import mount_read_only


def test_a_read_only_disk_is_named_and_the_old_text_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_atomic(path, "old")
    with mount_read_only(tmp_path), pytest.raises(UserError, match=r"cannot write .*notes\.txt: the disk is read-only"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
