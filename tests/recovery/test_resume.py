"""A resumed run is bitwise equal to an uninterrupted one; with another number of ranks it is equal to 1e-9.

Two ranks of the archetypes, and what is refused: tests/experiments/test_resume_of_archetypes.py.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from common.checkpoint import storage
from common.runs import provenance
from slurm.reports.status import read_status
from tests.harness.commands import execution
from tests.harness.commands.processes import Settings, execute_verb, get_only_run, make_environment, run_experiment
from tests.harness.environment.randomness import draw_cases
from tests.harness.experiments.registry import (
    ARCHETYPE_ENTRIES,
    ENTRIES,
    REPLICATED_ENTRY,
    STAGED_ENTRY,
    TRAINING_ENTRIES,
    Entry,
)
from tests.harness.repository import ROOT
from tests.harness.runs.resuming import (
    ONE_THREAD,
    TOTAL_STEPS,
    check_resume,
    copy_as_interrupted,
    find_differences,
    list_trained_steps,
    read_compared_rows,
    resume_run,
    train_uninterrupted,
)

archetype = pytest.mark.parametrize("entry", ARCHETYPE_ENTRIES, ids=lambda entry: entry.name)
WORLDS = [(entry, 2) for entry in ENTRIES if entry not in ARCHETYPE_ENTRIES]
WORLDS += itertools.product(ARCHETYPE_ENTRIES, (1, 3, 4))
RESIZABLE_ENTRIES = [entry for entry in TRAINING_ENTRIES if not entry.fixes_rank_count]
OTHER_SETTINGS: list[tuple[Entry, tuple[str, ...]]] = []
for experiment in ENTRIES:
    OTHER_SETTINGS += [(experiment, settings) for settings in experiment.resume_variants]


def make_id(parameter: Entry | tuple[str, ...] | int) -> str:
    if isinstance(parameter, Entry):
        return parameter.name
    return "-".join(parameter) if isinstance(parameter, tuple) else str(parameter)


RESUMED_RUNS = draw_cases("resumed runs", WORLDS, 4)


@pytest.mark.parametrize("entry, ranks", RESUMED_RUNS, ids=make_id)
def test_a_resumed_run_is_bitwise_equal(
    entry: Entry, ranks: int, tmp_path: Path, quick: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uninterrupted = train_uninterrupted(tmp_path_factory, quick, entry, ranks)
    assert len(list_trained_steps(uninterrupted.folder)) == TOTAL_STEPS
    is_real = (entry, ranks) == RESUMED_RUNS[0]  # one run is resumed by a new process, as a user resumes it
    check_resume(entry, uninterrupted, f"{entry.name}-{ranks}", tmp_path, real_process=is_real)


@pytest.mark.parametrize("entry, settings", draw_cases("resumes with other settings", OTHER_SETTINGS, 3), ids=make_id)
def test_a_resumed_run_with_other_settings_is_bitwise_equal(
    entry: Entry, settings: Settings, tmp_path: Path, quick: Settings
) -> None:
    uninterrupted = run_experiment(
        entry.name, *quick, ONE_THREAD, "steps=15", *settings, runs=tmp_path / "uninterrupted"
    )
    check_resume(entry, uninterrupted, "-".join([entry.name, *settings]), tmp_path / "cut")


@pytest.mark.parametrize("entry", draw_cases("last evaluations", TRAINING_ENTRIES, 2), ids=lambda entry: entry.name)
def test_a_run_that_lacks_only_the_last_evaluation_evaluates(
    entry: Entry, tmp_path: Path, quick: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uninterrupted = train_uninterrupted(tmp_path_factory, quick, entry, 2)
    folder = copy_as_interrupted(uninterrupted.folder, TOTAL_STEPS, tmp_path)
    assert len(folder.read_metrics()) < len(uninterrupted.folder.read_metrics())
    resumed = resume_run(entry, folder)
    assert read_compared_rows(folder) == read_compared_rows(uninterrupted.folder)
    assert folder.result["scores"] == uninterrupted.folder.result["scores"]
    assert "not measured: this attempt trained 0 steps" in resumed.stdout
    assert "timings" not in folder.result
    assert read_status(folder).samples_per_second > 0, "the speed of the first attempt"


@pytest.mark.parametrize(
    "entry", draw_cases("changed numbers of ranks", RESIZABLE_ENTRIES, 2), ids=lambda entry: entry.name
)
def test_a_run_is_resumed_with_fewer_ranks_and_then_with_more(entry: Entry, tmp_path: Path, quick: Settings) -> None:
    """Interrupted in both epochs: started by two ranks, resumed by one, and then by two."""
    steps = 20
    settings = (*quick, "dtype=float64", ONE_THREAD, f"steps={steps}")
    uninterrupted = run_experiment(entry.name, *settings, *entry.make_rank_settings(2), runs=tmp_path / "uninterrupted")
    folder = uninterrupted.folder
    for before, after, step in ((2, 1, 9), (1, 2, 15)):
        folder = copy_as_interrupted(folder, step, tmp_path / str(step))
        resumed = resume_run(entry, folder, *entry.make_rank_settings(after))
        assert f"resumed from step {step}" in resumed.stdout
        assert f"saved by {before} rank" in resumed.stdout
        losses = [row["loss"] for row in folder.read_metrics() if "loss" in row]
        assert losses == pytest.approx(uninterrupted.losses, abs=1e-9, rel=0)
        assert len(losses) == steps


def test_an_evaluation_within_an_epoch_that_follows_the_checkpoint_is_made_after_a_resume(
    tmp_path: Path, quick: Settings
) -> None:
    settings = (*quick, *REPLICATED_ENTRY.make_rank_settings(2), "evaluate_every=6", "data.block=2", ONE_THREAD)
    uninterrupted = run_experiment(REPLICATED_ENTRY.name, *settings, runs=tmp_path / "uninterrupted")
    evaluated = [row["global_step"] for row in uninterrupted.folder.read_metrics() if "test_loss" in row]
    assert evaluated == [6, 12, 13, 18, 24, 26, 30], "every 6 steps, and after each epoch of 13 steps"
    folder = copy_as_interrupted(uninterrupted.folder, 6, tmp_path / "cut")
    rows = folder.list_attempts()[0].metrics_file
    rows.write_text("".join(line for line in rows.read_text().splitlines(keepends=True) if "test_loss" not in line))
    resume_run(REPLICATED_ENTRY, folder)
    assert not find_differences(folder, uninterrupted.folder)


@archetype
def test_the_checkpoint_of_the_best_evaluation_is_kept(entry: Entry, tmp_path: Path, quick: Settings) -> None:
    saving = ("checkpoint.keep=2", "checkpoint.best=test_loss", "checkpoint.every_steps=5")
    length = ("epochs=8", "steps=0", "optim.lr=0.3")
    completed = run_experiment(entry.name, *quick, *entry.make_rank_settings(2), *saving, *length, runs=tmp_path)
    evaluations = [row for row in completed.folder.read_metrics() if "test_loss" in row]
    assert len(evaluations) == 8
    best_step = min(evaluations, key=lambda row: row["test_loss"])["global_step"]

    (attempt,) = completed.folder.list_attempts()
    assert (attempt.attempt_folder / "checkpoints" / "best").read_text() == f"step-{best_step:08d}\n"
    steps = [checkpoint.step for checkpoint in storage.list_checkpoints(attempt)]
    assert steps == sorted({best_step, *steps[-2:]})


def test_without_settled_buckets_a_resumed_run_differs(tmp_path: Path, quick: Settings) -> None:
    """DDP regroups its buckets in the first steps; four ranks then round differently."""
    script = str(ROOT / "experiments" / f"{REPLICATED_ENTRY.name}.py")
    runs = tmp_path / "uninterrupted"
    argv = [sys.executable, "-m", "tests.harness.runs.disabled_protection", "bucket_warm_up", script]
    settings = [*quick, *REPLICATED_ENTRY.make_rank_settings(4), f"runs={runs}"]
    execution.execute_command([*argv, *settings], env=make_environment(), status=0)
    uninterrupted = get_only_run(runs)
    folder = copy_as_interrupted(uninterrupted, 9, tmp_path / "cut")
    resume_run(REPLICATED_ENTRY, folder, disabled_protection="bucket_warm_up")
    assert find_differences(folder, uninterrupted)


def test_make_exp_resumes_with_the_code_of_the_run(
    tmp_path: Path, quick: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = copy_as_interrupted(train_uninterrupted(tmp_path_factory, quick, STAGED_ENTRY, 2).folder, 9, tmp_path)
    script = folder.path / "code" / "experiments" / "mnist_pipeline.py"
    script.write_text(script.read_text().replace("\nif __name__", "\nprint('code of the first start')\nif __name__"))
    (folder.path / "code" / provenance.CHECKSUMS).unlink()
    arguments = ("exp", f"--resume={folder.path}", "--launch=local", "--args=stages=1", "--", "")

    resumed = execute_verb(*arguments, status=0)
    assert "code of the first start\n" in resumed.stdout
    assert "resumed from step 9" in resumed.stdout
    assert "saved by 2 ranks and is resumed by 1:" in resumed.stdout
    assert "resumed with settings that differ from config.yaml: stages 2 -> 1\n" in resumed.stdout
    changed = json.loads((folder.list_attempts()[-1].attempt_folder / "changed.json").read_text())
    assert changed == {"stages": ["2", "1"]}
    assert list_trained_steps(folder) == list(range(1, TOTAL_STEPS + 1))

    resumed_again = execute_verb(*arguments, status=0)
    assert "is finished" in resumed_again.stdout
