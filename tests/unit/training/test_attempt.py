"""Custom optimizers at the start of an attempt, and the end of an attempt that was superseded or stopped."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from common.config import config
from common.config.config_keys import list_keys
from common.runs.tracking.wandb_tracker import Tracker
from common.system.exit_status import EXIT_REFUSED
from common.training.attempt import Attempt, TrainingOutcome
from common.training.run import Run
from configs.shared import Wandb
from slurm.reports import status
from tests.harness.commands.refusals import expect_refusal
from tests.harness.custom_code.optimizers import MIXING, write_optimizer
from tests.harness.experiments.registry import TRAINING_ENTRIES


def test_a_superseded_attempt_only_ends_its_tracking(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The newer attempt converts the rows, and writes result and history."""
    cfg = dataclasses.replace(run.cfg, wandb=Wandb(mode="offline"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("common.runs.claims.WITHDRAWAL_SECONDS", 0.1)
    tracker = Tracker.start(cfg, run.folder)
    attempt = Attempt(run.folder, run.prepared, is_new=False, tracker=tracker)
    run.folder.claim_attempt()
    capfd.readouterr()
    attempt.record_end(TrainingOutcome(EXIT_REFUSED), cfg, submitted=False)
    assert capfd.readouterr() == ("", "")
    assert not run.folder.result
    assert not (run.folder.attempt_folder / "logs" / "tracker.log").exists(), "nothing was converted"


SIGTERM_STATUS = 128 + signal.SIGTERM
STATES_AFTER_SIGTERM = [
    (TrainingOutcome(SIGTERM_STATUS), ("PREEMPTED", "stopped by SIGTERM")),
    (TrainingOutcome(SIGTERM_STATUS, "rank 0 was killed by SIGTERM"), ("FAILED", "rank 0 was killed by SIGTERM")),
]


@pytest.mark.parametrize("outcome, state", STATES_AFTER_SIGTERM)
def test_a_run_that_a_signal_stops_at_once_has_not_failed(
    outcome: TrainingOutcome, state: tuple[str, str], run: Run
) -> None:
    """The signal arrives while the run starts, or repeatedly."""
    attempt = Attempt(run.folder, run.prepared, is_new=False)
    attempt.record_end(outcome, run.cfg, submitted=True)
    assert not run.folder.result, "otherwise, the job would not be requeued"
    attempt.record_end(outcome, run.cfg, submitted=False)
    assert status.read_state(run.folder) == state


@pytest.mark.parametrize(
    "name", [entry.name for entry in TRAINING_ENTRIES if "zero1" in list_keys(config.import_schema(entry.name))]
)
def test_ranks_do_not_divide_the_parameters_of_an_optimizer_that_mixes_them(
    name: str, run: Run, tmp_path: Path
) -> None:
    schema = config.import_schema(name)
    optimizer = f"optim.name={write_optimizer(tmp_path, MIXING)}"
    settings = [optimizer, "optim.weight_decay=0"]
    if "replicas" in list_keys(schema):
        settings.append("replicas=2")
    attempt = Attempt(run.folder, run.prepared, is_new=True)
    cfg = config.load_config(schema, settings, {})
    attempt.check_custom_optimizer(cfg, is_joining=False)
    cfg = config.load_config(schema, [*settings, "zero1=true"], {})
    with expect_refusal(f"{optimizer}: ", MIXING.message_part):
        attempt.check_custom_optimizer(cfg, is_joining=False)
