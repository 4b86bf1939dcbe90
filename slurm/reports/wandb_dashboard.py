"""The `dashboard` command: save a W&B workspace for comparing runs. This module does not import torch.

The workspace shows the metrics and summary values that every run of this repository sends to W&B.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from common.runs.tracking import wandb_account
from common.system.errors import UserError, summarize_error
from configs.shared import Wandb
from slurm.arguments import parse_zero_or_one

TITLE = "Runs compared"  # name of the workspace


def parse_project(text: str) -> tuple[str, str]:
    """Split the value of PROJECT into the W&B entity and the project.

    The entity is empty if the value has the form PROJECT instead of ENTITY/PROJECT. Raises UserError if the value is
    invalid.
    """
    entity, _, project = text.rpartition("/")
    wandb = Wandb(project=project or Wandb.project, entity=entity)
    try:
        wandb.check()
        if "/" in entity or not f"{entity}{project}".isprintable():
            raise ValueError("the value must have the form PROJECT or ENTITY/PROJECT")
    except ValueError as error:
        raise UserError(f"PROJECT={text!r}: {error}") from None
    return wandb.entity, wandb.project


def make_workspace(entity: str, project: str) -> Any:
    """Create a W&B workspace for comparing runs. The workspace is not saved yet.

    Raises UserError if the package wandb_workspaces is not installed.
    """
    try:
        from wandb_workspaces import workspaces as ws
        from wandb_workspaces.reports import v2 as wr
    except ImportError as error:
        raise UserError(f"{error}; run: pip install -r requirements.txt") from None
    by_samples: list[Any] = [
        wr.LinePlot(title="training loss by samples", x="samples", y=["loss"], log_y=True),
        wr.LinePlot(title="test accuracy by samples", x="samples", y=["test_accuracy"]),
        wr.LinePlot(title="test loss by samples", x="samples", y=["test_loss"], log_y=True),
        wr.LinePlot(title="learning rate by samples", x="samples", y=["learning_rate"]),
        wr.LinePlot(title="gradient norm by samples", x="samples", y=["gradient_norm"], log_y=True),
    ]
    size = wr.Config("world_size")
    speed: list[Any] = [
        wr.BarPlot(title="samples per second", metrics=["samples_per_second"]),
        wr.LinePlot(title="seconds per step by samples", x="samples", y=["step_time"]),
        wr.ScatterPlot(title="throughput by ranks", x=size, y=wr.SummaryMetric("samples_per_second")),
        wr.ScatterPlot(title="scaling efficiency by ranks", x=size, y=wr.SummaryMetric("efficiency")),
        wr.BarPlot(title="share of time spent waiting for other ranks", metrics=["waiting"]),
    ]
    restarts: list[Any] = [wr.BarPlot(title="restarts", metrics=["restarts"]), wr.RunComparer(diff_only=True)]
    sections = [
        ws.Section(name="Learning", panels=by_samples, is_open=True),
        ws.Section(name="Speed", panels=speed, is_open=True),
        ws.Section(name="Restarts and settings", panels=restarts, is_open=True),
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=TITLE,
        sections=sections,
        settings=ws.WorkspaceSettings(max_runs=50),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config("experiment"), ws.Config("world_size")]),
    )


def main(args: argparse.Namespace) -> int:
    """Save the workspace, or print the workspace with DRY_RUN=1, and return the exit status.

    Raises UserError if PROJECT is invalid, if there is no W&B account, or if W&B rejects the workspace.
    """
    entity, project = parse_project(args.project)
    if parse_zero_or_one("DRY_RUN", args.dry_run):
        view = make_workspace(entity or "your-entity", project)._to_model()  # the content that save() sends
        print(json.dumps(json.loads(view.model_dump_json(by_alias=True, exclude_none=True)), indent=2))
        return 0
    wandb_account.require_account()
    import wandb

    try:
        workspace = make_workspace(entity or str(wandb.Api().default_entity), project).save()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (W&B's client may raise any type of error)
        raise UserError(f"W&B rejected the workspace: {summarize_error(error)}") from None
    print(f"workspace: {workspace.url}")
    return 0
