"""Writing checkpoints: the folder survives a power failure, and incomplete files are not published."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint import storage
from common.checkpoint.storage import Manifest, ManifestEntry, StagingDir
from common.runs.folder import RunFolder
from tests.harness.environment.disk_calls import record_disk_calls


def test_a_new_checkpoints_folder_is_on_the_disk_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = RunFolder(tmp_path).claim_attempt()
    calls = record_disk_calls(monkeypatch)
    StagingDir(attempt, 1).create()
    assert calls == ["sync 0001"], "the folder of the attempt contains the new folder"


def test_a_checkpoint_is_not_published_if_a_file_does_not_have_the_written_size(tmp_path: Path) -> None:
    """Another host may have written the file, and a network disk may show it late."""
    attempt = RunFolder(tmp_path).claim_attempt()
    staging_dir = StagingDir(attempt, 1)
    staging_dir.create()
    (staging_dir.path / "rank-0.pt").write_bytes(b"12")
    manifest = Manifest(1, attempt.number, 1, {"rank-0.pt": ManifestEntry(3, "")}, {})
    with pytest.raises(OSError, match=r"the size of rank-0\.pt on this host differs from the number of bytes written"):
        staging_dir.publish(manifest)
    assert not storage.list_checkpoints(attempt)
