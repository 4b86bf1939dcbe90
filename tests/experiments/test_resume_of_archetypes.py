"""A resumed run equals an uninterrupted one to the bit, once staged and once replicated; invalid resumes are refused.

All experiments, numbers of ranks and settings: tests/recovery/test_resume.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from common.checkpoint import storage
from common.models import networks
from common.runs.folder import RunFolder
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.experiments.registry import ARCHETYPE_ENTRIES, REPLICATED_ENTRY, STAGED_ENTRY, Entry
from tests.harness.runs.resuming import (
    ONE_THREAD,
    TOTAL_STEPS,
    check_resume,
    copy_as_interrupted,
    find_differences,
    resume_run,
    train_uninterrupted,
)


@pytest.mark.parametrize("entry", ARCHETYPE_ENTRIES, ids=lambda entry: entry.name)
def test_a_resumed_run_of_two_processes_is_equal_to_the_bit(
    entry: Entry, tmp_path: Path, quick: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uninterrupted = train_uninterrupted(tmp_path_factory, quick, entry, 2)
    assert len(uninterrupted.losses) == TOTAL_STEPS
    check_resume(entry, uninterrupted, f"{entry.name}-2", tmp_path)


def test_a_finished_run_is_not_resumed(
    tmp_path: Path, quick: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uninterrupted = train_uninterrupted(tmp_path_factory, quick, STAGED_ENTRY, 2).folder
    folder = RunFolder(shutil.copytree(uninterrupted.path, tmp_path / uninterrupted.path.name))
    again = resume_run(STAGED_ENTRY, folder)
    assert "is finished" in again.stdout
    other = resume_run(REPLICATED_ENTRY, folder, status=2)
    assert "is a run of mnist_pipeline, not of ddp_multinode" in other.stderr
    assert len(folder.list_attempts()) == 1


def test_a_run_that_is_past_the_new_last_step_is_not_resumed(
    tmp_path: Path, quick: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It would finish without a step."""
    folder = copy_as_interrupted(train_uninterrupted(tmp_path_factory, quick, STAGED_ENTRY, 2).folder, 15, tmp_path)
    completed = resume_run(STAGED_ENTRY, folder, "steps=10", status=2)
    assert f"steps=10 is less than the 15 steps that {folder.path.name} has completed" in completed.stderr
    assert len(folder.list_attempts()) == 1


@pytest.mark.slow
def test_a_run_extended_at_the_end_of_an_epoch_is_evaluated_once(tmp_path: Path, quick: Settings) -> None:
    folder = run_experiment(REPLICATED_ENTRY.name, *quick, ONE_THREAD, "steps=13", runs=tmp_path).folder
    completed = resume_run(REPLICATED_ENTRY, folder, "steps=14")
    assert completed.stdout.count("epoch 1  step 13") == 1, completed.stdout + completed.stderr
    assert [row["global_step"] for row in folder.read_metrics() if "test_loss" in row] == [13, 14]


def test_a_run_with_an_empty_config_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "mnist_pipeline-1-2-3").mkdir()
    (tmp_path / "mnist_pipeline-1-2-3/config.yaml").touch()
    completed = resume_run(STAGED_ENTRY, RunFolder(tmp_path / "mnist_pipeline-1-2-3"), status=2)
    assert "config.yaml is empty" in completed.stderr


def test_settings_that_define_the_training_cannot_change_in_a_resume(tmp_path: Path, quick: Settings) -> None:
    (tmp_path / "mnist_pipeline-1-2-3").mkdir()
    text = run_experiment("mnist_pipeline", *quick, "--print-config", runs=tmp_path).stdout
    (tmp_path / "mnist_pipeline-1-2-3/config.yaml").write_text(text)
    changes = ("batch=40", "seed=5", "optim.name=adam", "data.train_limit=300", "wandb.project=other", "width=64")
    for change in changes:
        completed = resume_run(STAGED_ENTRY, RunFolder(tmp_path / "mnist_pipeline-1-2-3"), change, status=2)
        assert f"{change.partition('=')[0]} cannot change when a run is resumed" in completed.stderr


@pytest.mark.slow
def test_a_worse_evaluation_after_a_resume_is_not_the_best(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, "checkpoint.best=test_loss", "microbatches=2", "optim.decay=constant", ONE_THREAD)
    uninterrupted = run_experiment(STAGED_ENTRY.name, *settings, runs=tmp_path / "whole")
    folder = copy_as_interrupted(uninterrupted.folder, 27, tmp_path)  # between the evaluations of steps 26 and 30
    completed = resume_run(STAGED_ENTRY, folder, "optim.lr=0.5")
    assert "resumed from step 27" in completed.stdout, completed.stderr
    scores = {row["global_step"]: row["test_loss"] for row in folder.read_metrics() if "test_loss" in row}
    assert list(scores) == [13, 26, 30]
    assert scores[26] < min(scores[13], scores[30])
    assert storage.read_pointer_file(folder.list_attempts()[1], "best") is None


def test_a_run_without_a_checkpoint_restarts_from_step_0(tmp_path: Path, digits: Settings) -> None:
    first = run_experiment("mnist_pipeline", *digits, "checkpoint.every_seconds=0", "steps=3", runs=tmp_path)
    (first.folder.path / "result.json").unlink()
    shutil.rmtree(first.folder.list_attempts()[0].attempt_folder / "checkpoints")
    completed = resume_run(STAGED_ENTRY, first.folder)
    assert "no checkpoint found; restarting from step 0 in run folder" in completed.stdout
    assert len(first.losses) == 3


@pytest.mark.slow
def test_a_resume_needs_the_initial_weights_only_without_a_checkpoint(tmp_path: Path, quick: Settings) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(networks.build_network("mlp", (28, 28), 10).state_dict(), weights)
    settings = (*quick, "model=mlp", "steps=9", f"weights={weights}", ONE_THREAD)
    uninterrupted = run_experiment(REPLICATED_ENTRY.name, *settings, runs=tmp_path / "whole")
    folder = copy_as_interrupted(uninterrupted.folder, 6, tmp_path / "cut")
    weights.unlink()
    resume_run(REPLICATED_ENTRY, folder)
    assert find_differences(folder, uninterrupted.folder) == []
    folder_without_checkpoint = copy_as_interrupted(uninterrupted.folder, 0, tmp_path / "begun")
    refused = resume_run(REPLICATED_ENTRY, folder_without_checkpoint, status=2)
    assert f"weights={weights}: no such file" in refused.stderr, refused.stderr
