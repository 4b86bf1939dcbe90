"""Files of run folders are written atomically, with a clear message if the disk cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.runs import metrics_writer
from common.runs.folder import RunFolder, fsync_path, write_atomic, write_json_once
from common.runs.metrics_writer import MetricsWriter
from common.system.errors import UserError
from tests.harness.environment.disk_calls import record_disk_calls
from tests.harness.environment.permissions import enforce_permissions
from tests.harness.environment.read_only import mount_read_only


def test_a_read_only_disk_is_named_and_the_old_text_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_atomic(path, "old")
    with mount_read_only(tmp_path), pytest.raises(UserError, match=r"cannot write .*notes\.txt: the disk is read-only"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_start_of_an_attempt_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = RunFolder(tmp_path).claim_attempt()
    calls = record_disk_calls(monkeypatch)
    attempt.record_parent_attempt(None, 0)
    draft = f".attempt.json.{os.getpid()}"
    assert calls == [f"sync {draft}", f"rename {draft}", "sync 0001", "sync attempts"]


def test_a_file_is_written_once_on_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "result.json"
    assert write_json_once(path, "first")
    assert not write_json_once(path, "second")
    assert path.read_text() == '"first"\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_network_disk_that_cannot_flush_folders_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    fsync_path(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="Invalid argument"):
        fsync_path(file)


def test_rows_are_kept_while_a_network_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    writer = MetricsWriter(tmp_path / "metrics.jsonl", warnings.append)

    def fail(path: Path, mode: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_writer, "open", fail, raising=False)
        writer.add_rows([{"loss": 1.0}])
    assert warnings[0].startswith(f"WARNING: cannot write {writer.file}: Stale file handle; training continues")
    writer.add_rows([{"loss": 2.0}])
    assert writer.file.read_text() == '{"loss": 1.0}\n{"loss": 2.0}\n'


def test_a_folder_that_the_user_may_not_enter_is_named(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    with (
        enforce_permissions(),
        pytest.raises(UserError, match=r"locked/runs/.*: no permission to write; choose another"),
    ):
        RunFolder.create(locked / "runs", "ddp_multinode", "")


def test_a_run_is_refused_whose_source_code_could_not_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "14:30" / "runs"
    message = r"the absolute path must not contain ':'; use another folder"
    with pytest.raises(UserError, match=message):
        RunFolder.create(runs, "ddp_multinode", "")
    runs.parent.mkdir()
    monkeypatch.chdir(runs.parent)
    with pytest.raises(UserError, match=rf"runs=runs: {message}"):
        RunFolder.create(Path("runs"), "ddp_multinode", "")
    assert not runs.exists()
