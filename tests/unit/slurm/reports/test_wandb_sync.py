"""Data that `make sync` sends to W&B."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.runs.tracking import wandb_account, wandb_rows, wandb_upload
from common.system.errors import UserError
from slurm.reports import wandb_sync
from tests.harness.runs.synthetic_runs import SyntheticRun


def test_a_run_that_cannot_be_converted_does_not_block_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, intact = (SyntheticRun(number=number, steps=20).write(tmp_path) for number in range(2))
    sent: list[str] = []

    def send(folder: RunFolder) -> None:
        if folder.path == broken.path:
            raise UserError("its config is invalid")
        sent.append(folder.path.name)

    monkeypatch.setattr(wandb_rows, "list_incomplete_notes", lambda folder: ["note"])
    monkeypatch.setattr(wandb_account, "require_account", lambda: None)
    monkeypatch.setattr(wandb_upload, "send_missing_rows", send)
    assert wandb_sync.send_runs_to_wandb([broken, intact], dry=False) == 1
    assert sent == [intact.path.name]
    assert f"skipped {broken.path.name}: its config is invalid\n" in capsys.readouterr().out
