"""Custom optimizers at the start of an attempt, and the end of an attempt that another one has superseded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common.config import config
from common.runs.tracking.wandb_tracker import Tracker
from common.system.exit_status import EXIT_REFUSED
from common.training.attempt import Attempt, TrainingOutcome
from common.training.run import Run
from configs.shared import Wandb
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
