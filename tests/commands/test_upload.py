"""make sync, dashboard and leet without a W&B host; tests with a host are in tests/complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm.reports import wandb_sync
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import execute_verb, make_environment
from tests.harness.runs.synthetic_runs import SyntheticRun


def panels(view: dict[str, Any]) -> dict[str, Any]:
    """Return the configs of the panels of a view, by title."""
    configs = {}
    for section in view["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:
            configs[panel["config"].get("chartTitle")] = panel["config"]
    return configs


def test_the_dashboard_is_shown_and_nothing_is_sent() -> None:
    nowhere = make_environment(WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="5ec" + "0" * 36 + "7")
    completed = execute_verb("dashboard", "--project=team/mine", "--dry-run=1", env=nowhere, status=0)
    view = json.loads(completed.stdout)
    assert (view["entity"], view["project"]) == ("team", "mine")
    charts = panels(view["spec"])
    assert charts["training loss by samples"]["xAxis"] == "samples"
    assert charts["test accuracy by samples"]["metrics"] == ["test_accuracy"]
    efficiency = charts["scaling efficiency by ranks"]
    assert efficiency["xAxis"] == "config:world_size.value"
    assert efficiency["yAxis"] == "summary:efficiency"
    assert {"samples per second", "share of time spent waiting for other ranks", "restarts"} <= charts.keys()
    (runset,) = view["spec"]["section"]["runSets"]
    assert [key["name"] for key in runset["grouping"]] == ["experiment.value", "world_size.value"]


@pytest.mark.parametrize("project", ["a/b/c", "x#y", "x" * 200, "a\nb"])
def test_a_wrong_project_is_refused(project: str) -> None:
    completed = in_process_calls.call_verb("dashboard", f"--project={project}", "--dry-run=1", status=2)
    assert "PROJECT=" in completed.stderr
    assert len(completed.stderr.splitlines()) == 1


def test_without_an_account_nothing_is_sent(tmp_path: Path) -> None:
    folder = SyntheticRun("mnist_pipeline", 0, 10).write(tmp_path / "runs")
    (folder.path / "wandb/offline-run-1").mkdir(parents=True)
    (folder.path / "wandb/offline-run-1/run.wandb").touch()
    env = make_environment(HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9", WANDB_ERROR_REPORTING="false")
    completed = execute_verb("sync", f"--runs-folder={tmp_path / 'runs'}", env=env, status=2)
    assert "no W&B account is configured" in completed.stderr
    assert "wandb login" in completed.stderr


def test_only_tracked_runs_are_viewed(tmp_path: Path) -> None:
    folder = SyntheticRun("mnist_pipeline", 0x12, 10).write(tmp_path / "runs")
    refused = in_process_calls.call_verb("leet", f"--runs-folder={tmp_path / 'runs'}", status=2)
    assert "make compare" in refused.stderr
    for began in ("20261124_231721", "20261124_231905"):
        folder_of_start = folder.path / "wandb" / f"offline-run-{began}-f1b54ceb"
        folder_of_start.mkdir(parents=True)
        (folder_of_start / "run-f1b54ceb.wandb").touch()
        (folder.path / "wandb/latest-run").unlink(missing_ok=True)
        (folder.path / "wandb/latest-run").symlink_to(folder_of_start)
    merged = tmp_path / "merged"
    merged.mkdir()
    assert wandb_sync.link_wandb_logs([folder], merged) == 2
    first, second = sorted(merged.iterdir())
    assert first.name == "run-20261124_231721-0012-mnist_pipeline-1"
    assert (second / "run-0012-mnist_pipeline-2.wandb").resolve() == folder_of_start / "run-f1b54ceb.wandb"
