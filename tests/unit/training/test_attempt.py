"""Custom optimizers at the start of an attempt, and the end of an attempt that was superseded or stopped."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from common.config import config
from common.runs.tracking.wandb_tracker import Tracker
from common.system.exit_status import EXIT_REFUSED
from common.training.attempt import Attempt, TrainingOutcome
from common.training.run import Run
from configs.shared import Wandb
from slurm.reports import status
from tests.harness.commands.refusals import expect_refusal
from tests.harness.custom_code.optimizers import MIXING, write_optimizer


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


DIVIDED_UPDATES = (
    *("ddp_multinode zero1=true", "resnet_dataparallel zero1=true", "mnist_pipeline stages=2"),
    "resnet_modelparallel stages=1 replicas=2 zero1=true",
    "resnet_modelparallel stages=2 replicas=2 zero1=true",
    "resnet_modelparallel stages=2 mode=naive devices=[]",
)
WHOLE_UPDATES = (
    *("ddp_multinode", "resnet_dataparallel", "mnist_pipeline stages=1", "mnist_pipeline stages_per_process=2"),
    *("resnet_modelparallel stages=1 replicas=2", "resnet_modelparallel mode=single"),
    "resnet_modelparallel mode=naive devices=[cuda:0,cuda:1]",
)


@pytest.mark.parametrize("arguments", DIVIDED_UPDATES)
def test_ranks_do_not_divide_the_parameters_of_an_optimizer_that_mixes_them(
    arguments: str, run: Run, tmp_path: Path
) -> None:
    """The message names the settings that let every rank update all parameters."""
    name, *settings = arguments.split()
    optimizer = f"optim.name={write_optimizer(tmp_path, MIXING)}"
    cfg = config.load_config(config.import_schema(name), [*settings, optimizer, "optim.weight_decay=0"], {})
    remedies = {"zero1=true": "zero1=false", "stages=2": "stages=1"}
    remedy = " and ".join(remedies[setting] for setting in remedies if setting in settings)
    with expect_refusal(f"{optimizer}: ", MIXING.message_part, f"; use {remedy}"):
        Attempt(run.folder, run.prepared, is_new=True).check_custom_optimizer(cfg, is_joining=False)


@pytest.mark.parametrize("arguments", WHOLE_UPDATES)
def test_an_optimizer_may_mix_parameters_if_every_rank_updates_all(arguments: str, run: Run, tmp_path: Path) -> None:
    name, *settings = arguments.split()
    optimizer = f"optim.name={write_optimizer(tmp_path, MIXING)}"
    cfg = config.load_config(config.import_schema(name), [*settings, optimizer, "optim.weight_decay=0"], {})
    Attempt(run.folder, run.prepared, is_new=True).check_custom_optimizer(cfg, is_joining=False)
