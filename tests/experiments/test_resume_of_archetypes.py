"""A run that is started again goes on to the bit, once staged and once replicated; and what cannot go on is refused.

All experiments, numbers of processes and settings: tests/recovery/test_resume.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from common.checkpoint import storage
from common.models import networks
from common.runs.folder import RunFolder
from tests.harness.processes import run
from tests.harness.registry import ARCHETYPES, REPLICATED, STAGED, Entry
from tests.harness.resuming import ALONE, STEPS, check_that_it_goes_on, cut_off, differences, resume, whole_run


@pytest.mark.parametrize("entry", ARCHETYPES, ids=lambda entry: entry.name)
def test_a_resumed_run_of_two_processes_is_equal_to_the_bit(
    entry: Entry, tmp_path: Path, quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = whole_run(tmp_path_factory, quick, entry, 2)
    assert len(whole.losses) == STEPS
    check_that_it_goes_on(entry, whole, f"{entry.name}-2", tmp_path)


def test_a_finished_run_does_not_go_on(
    tmp_path: Path, quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = whole_run(tmp_path_factory, quick, STAGED, 2).folder
    folder = RunFolder(shutil.copytree(whole.path, tmp_path / whole.path.name))
    again = resume(STAGED, folder)
    assert again.returncode == 0 and "is finished" in again.stdout
    other = resume(REPLICATED, folder)
    assert other.returncode == 2 and "is a run of mnist_pipeline, not of ddp_multinode" in other.stderr
    assert len(folder.list_attempts()) == 1


def test_a_run_that_is_past_the_new_last_step_is_not_resumed(
    tmp_path: Path, quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It would end as finished without a step."""
    folder = cut_off(whole_run(tmp_path_factory, quick, STAGED, 2).folder, 15, tmp_path)
    done = resume(STAGED, folder, "steps=10")
    assert done.returncode == 2
    assert f"steps=10 is less than the 15 steps that {folder.path.name} has completed" in done.stderr
    assert len(folder.list_attempts()) == 1


def test_training_on_from_the_end_of_an_epoch_evaluates_once(tmp_path: Path, quick: tuple[str, ...]) -> None:
    folder = run(REPLICATED.name, *quick, ALONE, "steps=13", runs=tmp_path).folder
    done = resume(REPLICATED, folder, "steps=14")
    assert done.returncode == 0 and done.stdout.count("epoch 1  step 13") == 1, done.stdout + done.stderr
    assert [row["global_step"] for row in folder.read_metrics() if "test_loss" in row] == [13, 14]


def test_a_run_whose_settings_are_lost_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "mnist_pipeline-1-2-3").mkdir()
    (tmp_path / "mnist_pipeline-1-2-3" / "config.yaml").touch()
    done = resume(STAGED, RunFolder(tmp_path / "mnist_pipeline-1-2-3"))
    assert done.returncode == 2 and "config.yaml is empty" in done.stderr and "Traceback" not in done.stderr


def test_settings_that_make_another_run_cannot_change_when_it_goes_on(tmp_path: Path, quick: tuple[str, ...]) -> None:
    (tmp_path / "mnist_pipeline-1-2-3").mkdir()
    text = run("mnist_pipeline", *quick, "--print-config", runs=tmp_path).out
    (tmp_path / "mnist_pipeline-1-2-3" / "config.yaml").write_text(text)
    for word in ("batch=40", "seed=5", "optim.name=adam", "data.train_limit=300", "wandb.project=other", "width=64"):
        done = resume(STAGED, RunFolder(tmp_path / "mnist_pipeline-1-2-3"), word)
        assert done.returncode == 2, word
        assert f"{word.partition('=')[0]} cannot change when a run is resumed" in done.stderr


def test_a_worse_evaluation_after_a_resume_is_not_the_best(tmp_path: Path, quick: tuple[str, ...]) -> None:
    words = (*quick, "checkpoint.best=test_loss", "microbatches=2", "optim.decay=constant", ALONE)
    whole = run(STAGED.name, *words, runs=tmp_path / "whole")
    folder = cut_off(whole.folder, 27, tmp_path)  # between the evaluations of steps 26 and 30
    done = resume(STAGED, folder, "optim.lr=0.5")
    assert done.returncode == 0 and "resumed from step 27" in done.stdout, done.stderr
    scores = {row["global_step"]: row["test_loss"] for row in folder.read_metrics() if "test_loss" in row}
    assert list(scores) == [13, 26, 30] and scores[26] < min(scores[13], scores[30])
    assert storage.read_pointer_file(folder.list_attempts()[1], "best") is None


def test_without_a_checkpoint_it_says_that_it_begins_anew(tmp_path: Path, digits: tuple[str, ...]) -> None:
    begun = run("mnist_pipeline", *digits, "checkpoint.every_seconds=0", "steps=3", runs=tmp_path)
    (begun.folder.path / "result.json").unlink()
    shutil.rmtree(begun.folder.list_attempts()[0].attempt_folder / "checkpoints")
    done = resume(STAGED, begun.folder)
    assert done.returncode == 0, done.stderr
    assert "no checkpoint found; restarting from step 0 in run folder" in done.stdout
    assert len(begun.losses) == 3


def test_a_run_goes_on_without_the_weights_that_it_began_with(tmp_path: Path, quick: tuple[str, ...]) -> None:
    """The checkpoint has what came of them; only a run without one needs them again."""
    weights = tmp_path / "weights.pt"
    torch.save(networks.build_network("mlp", (28, 28), 10).state_dict(), weights)
    words = (*quick, "model=mlp", "steps=9", f"weights={weights}", ALONE)
    whole = run(REPLICATED.name, *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    folder = cut_off(whole.folder, 6, tmp_path / "cut")
    weights.unlink()
    done = resume(REPLICATED, folder)
    assert done.returncode == 0, done.stderr
    assert not (found := differences(folder, whole.folder)), found
    begun = cut_off(whole.folder, 0, tmp_path / "begun")
    refused = resume(REPLICATED, begun)
    assert refused.returncode == 2 and f"weights={weights}: no such file" in refused.stderr, refused.stderr
