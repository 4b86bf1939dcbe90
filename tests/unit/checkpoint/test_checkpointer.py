"""Saving checkpoints: contents, deletion of old ones, several attempts, and disks that refuse to write."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.checkpoint import checkpointer, storage
from common.checkpoint.checkpointer import CheckpointState
from common.system.errors import RunTakenError
from tests.harness.environment.disk_calls import record_disk_calls
from tests.harness.ranks.checkpoint_cases import make_state
from tests.unit.checkpoint.conftest import RunWithCheckpoints


def list_bytes(tensor: Tensor) -> list[int]:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()


def test_all_saved_values_are_loaded(run: RunWithCheckpoints) -> None:
    base = torch.arange(100_000.0)
    model = {
        "view": base[10:14],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": base[:0],
        "parameter": nn.Parameter(torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]])),
    }
    common = {"text": "é", "deep": {"list": [1, (2.5, None, True)], 3: b"\x00"}, "huge": 2**70, "nan": float("inf")}
    state = CheckpointState(model, {"view": {"step": 3, "m": base[:4]}}, common, {"mine": base[:2]})
    assert run.checkpointer.save(5, state)

    loaded = run.load_checkpoint()
    assert loaded.step == 5
    assert loaded.attempt == 1
    assert loaded.processes == 1
    assert loaded.resumes_exactly
    for name, tensor in model.items():
        loaded_tensor = loaded.model[name]
        assert loaded_tensor.dtype == tensor.dtype
        assert loaded_tensor.shape == tensor.shape
        assert list_bytes(loaded_tensor) == list_bytes(tensor), name
    assert loaded.common == common
    assert loaded.optimizer["view"]["m"].tolist() == [0, 1, 2, 3]
    assert loaded.local is not None
    assert loaded.local["mine"].tolist() == [0, 1]
    assert run.get_rank_file(5).stat().st_size < 20_000, "a view must be saved without the rest of its storage"


INVALID_TYPES = [
    ({"a": [np.float64(1)]}, "common['a'][0] has type float64"),
    ({"a": {1}}, "common['a'] has type set"),
    ({"a": {"b": nn.Linear(1, 1)}}, "common['a']['b'] has type Linear"),
]


@pytest.mark.parametrize("common, message", INVALID_TYPES)
def test_types_that_cannot_be_loaded_are_refused_when_saving(
    run: RunWithCheckpoints, common: Any, message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        run.checkpointer.save(1, CheckpointState({}, {}, common))
    assert message in str(caught.value)


# ---- which checkpoints are deleted


def test_the_newest_checkpoints_and_the_best_one_are_kept(run: RunWithCheckpoints) -> None:
    run.save(1, 2)
    run.save(3, best=True)
    run.save(4, 5, 6)
    assert run.list_names() == ["best", "latest", "step-00000003", "step-00000005", "step-00000006"]
    checkpoints_folder = run.get_checkpoint(6).parent
    assert (checkpoints_folder / "latest").read_text() == "step-00000006\n"
    assert (checkpoints_folder / "best").read_text() == "step-00000003\n"
    run.save(6, best=True)  # a step is not written twice, but it can become the best
    run.save(7)
    assert run.list_names() == ["best", "latest", "step-00000006", "step-00000007"]


def test_a_superseded_attempt_saves_and_deletes_nothing(run: RunWithCheckpoints) -> None:
    old_checkpointer = run.checkpointer
    old_attempt = run.get_attempt(1)
    run.save(1, 2)
    run.restart(1, 1)
    message = r"attempt 1 of run was superseded by attempt 2; stopping without saving"
    for step in (3, 4, 5):
        with pytest.raises(RunTakenError, match=message):
            old_checkpointer.save(step, make_state(step))
    assert run.list_steps(attempt_number=1) == [1, 2]
    assert not storage.list_staging_dirs(old_attempt)
    assert run.load() == 1, "checkpoints of the parent after the branching step do not count"
    run.save(2)
    assert run.load() == 2
    resumable = storage.list_resumable_checkpoints(run.folder)
    assert [(checkpoint.attempt.number, checkpoint.step) for checkpoint in resumable] == [(2, 2), (1, 1)]


def test_a_superseded_attempt_retires_no_checkpoint(run: RunWithCheckpoints) -> None:
    run.save(1, best=True)
    run.save(2, 3)
    run.restart(1, 3)
    assert storage.retire_old_checkpoints(run.get_attempt(1), keep=2, best=3) == []
    assert run.list_steps(attempt_number=1) == [1, 2, 3]


def test_checkpoints_of_older_attempts_are_kept_until_the_newest_attempt_has_enough(run: RunWithCheckpoints) -> None:
    run.save(1)
    run.save(2, best=True)
    run.save(3)
    old_folder = storage.get_checkpoints_dir(run.get_attempt(1))
    (old_folder / ".step-00000004.new").mkdir()
    run.restart(1, 3)
    run.save(4)
    assert run.list_steps(attempt_number=1) == [2, 3], "the only checkpoint of the newest attempt may turn out damaged"
    run.save(5)
    assert run.list_steps(attempt_number=1) == [2], "the best checkpoint so far"
    assert sorted(path.name for path in old_folder.iterdir()) == ["best", "latest", "step-00000002"]
    run.save(6, best=True)
    assert not run.list_steps(attempt_number=1)
    assert run.load() == 6


def test_many_attempts_keep_no_more_checkpoints_than_one(run: RunWithCheckpoints) -> None:
    for step in range(1, 21):
        run.save(step)
        steps: list[int] = []
        for attempt in run.folder.list_attempts():
            steps += run.list_steps(attempt.number)
        assert steps == ([step - 1, step] if step > 1 else [step])
        run.restart(run.folder.number, step)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 3)])
@pytest.mark.parametrize("name", ["rank-0.pt", storage.MANIFEST])
def test_damaged_checkpoints_do_not_count_as_kept(
    run: RunWithCheckpoints, name: str, damage: Callable[[Path], object]
) -> None:
    run.save(1, 2)
    damage(run.get_checkpoint(2) / name)
    run.restart(1, 1)
    run.save(3)
    assert 1 in run.list_steps(attempt_number=1)
    damage(run.get_checkpoint(3) / name)
    assert run.load() == 1
    run.checkpointer = run.make_checkpointer()
    run.save(4, 5)
    assert not run.list_steps(attempt_number=1)
    assert run.list_steps(attempt_number=2) == [4, 5]


# ---- disks


def test_all_files_are_on_the_disk_before_the_rename(run: RunWithCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the system calls decides what is left after a power failure."""
    run.save(1)
    run.folder.metrics_file.write_text("{}\n")
    calls = record_disk_calls(monkeypatch)
    run.save(2)
    assert calls[:3] == ["sync rank-0.pt", "sync metrics.jsonl", "sync manifest.json"]
    assert calls[3:6] == ["sync .step-00000002.new", "rename .step-00000002.new", "sync checkpoints"]


def fill_disk(file: Path, free_bytes: int) -> None:
    """Write to a file until the disk is full, then free some bytes again."""
    with open(file, "wb", buffering=0) as opened:
        try:
            while opened.write(bytes(4096)):
                pass
        except OSError:
            os.truncate(file, file.stat().st_size - free_bytes)


@pytest.mark.parametrize("free_bytes", [0, 100, 4096, 20_000, 40_000])
def test_a_full_disk_is_reported_once_and_training_continues(
    small_disk_run: RunWithCheckpoints, free_bytes: int
) -> None:
    run = small_disk_run
    run.save(1, 2)
    ballast = run.folder.path / "ballast"
    fill_disk(ballast, free_bytes)
    state = CheckpointState({"w": torch.rand(20_000)}, {}, {})
    assert run.checkpointer.save(3, state) is False
    assert run.messages[0].startswith("WARNING: no checkpoint was saved for step 3: ")
    assert os.strerror(errno.ENOSPC) in run.messages[0]
    assert "the newest checkpoint is from step 2" in run.messages[0]
    assert run.list_names() == ["latest", "step-00000001", "step-00000002"], "incomplete checkpoints are deleted"
    assert run.load() == 2

    message_count = len(run.messages)
    assert run.checkpointer.save(4, state) is False
    assert len(run.messages) == message_count
    ballast.unlink()
    assert run.checkpointer.save(5, state)
    assert run.messages[message_count:] == ["checkpoint saved after step 5; saving works again"]


def test_a_read_only_disk_is_reported_and_training_continues(small_disk_run: RunWithCheckpoints) -> None:
    run = small_disk_run
    disk = run.folder.path.parent
    run.save(1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert run.checkpointer.save(2, make_state(2)) is False
    assert os.strerror(errno.EROFS) in run.messages[0]
    assert run.load() == 1
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    run.save(3)
    assert run.load() == 3


def test_writing_is_retried(run: RunWithCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The obstacle disappears during the pause."""
    monkeypatch.setattr(checkpointer, "RETRY_SECONDS", 0.3)
    obstacle = storage.get_checkpoints_dir(run.folder)
    obstacle.write_text("not a folder")
    assert not run.make_checkpointer(retries=0).save(1, make_state(1))
    timer = threading.Timer(0.1, obstacle.unlink)
    timer.start()
    assert run.make_checkpointer(retries=1).save(1, make_state(1))
    timer.join()
