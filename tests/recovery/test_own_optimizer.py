"""Runs with a custom optimizer and decay: trained, resumed after the files have changed, and refused."""

from __future__ import annotations

from pathlib import Path

from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.custom_code.examples import write_example
from tests.harness.custom_code.optimizers import VIOLATIONS, write_optimizer
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.resuming import check_resume


def test_a_run_keeps_optimizer_and_decay_of_the_contributing_page(tmp_path: Path, quick: Settings) -> None:
    optimizer_file = write_example(tmp_path, "lion.py")
    decay_file = write_example(tmp_path, "halving.py")
    custom_code = (f"optim.name={optimizer_file}:Lion", "optim.lr=0.001", f"optim.decay={decay_file}:halve")
    settings = (
        *quick,
        *custom_code,
        "optim.decayed=matrices",
        "optim.weight_decay=0.1",
        *REPLICATED_ENTRY.make_rank_settings(2),
    )
    completed = run_experiment(REPLICATED_ENTRY.name, *settings, runs=tmp_path / "runs")
    assert completed.losses[-1] < 0.9 * completed.losses[0]
    # the copies in alphabetical order: first the decay, then the optimizer
    decay_copy, optimizer_copy = sorted((completed.folder.path / "code" / "own").iterdir())
    assert decay_copy.read_text() == decay_file.read_text()
    assert optimizer_copy.read_text() == optimizer_file.read_text()

    config_text = (completed.folder.path / "config.yaml").read_text()
    for file in (optimizer_file, decay_file):
        file.write_text("changed since the start")
    resumed_folder = check_resume(REPLICATED_ENTRY, completed, "custom optimizer", tmp_path / "resumed")
    assert (resumed_folder.path / "config.yaml").read_text() == config_text


def test_a_run_refuses_a_class_that_would_lose_its_state(tmp_path: Path, digits: Settings) -> None:
    breach = VIOLATIONS["state elsewhere"]
    settings = (*digits, f"optim.name={write_optimizer(tmp_path, breach)}", *REPLICATED_ENTRY.smallest_settings)
    completed = run_experiment(REPLICATED_ENTRY.name, *settings, runs=tmp_path / "runs", status=2)
    (message,) = [line for line in completed.stderr.splitlines() if line.startswith("error: ")]
    assert breach.message_part in message
    assert not list((tmp_path / "runs").iterdir()), "a run that is refused before step 1 leaves no folder"
