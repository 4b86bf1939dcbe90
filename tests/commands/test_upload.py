"""make sync, dashboard and leet without a host: what they show, and what they refuse. Hosts: tests/complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm.reports import wandb_sync
from tests.harness import inside, warm
from tests.harness.made_runs import Made
from tests.harness.processes import environment


def panels(view: dict[str, Any]) -> dict[str, Any]:
    sections = view["section"]["panelBankConfig"]["sections"]
    return {panel["config"].get("chartTitle"): panel["config"] for section in sections for panel in section["panels"]}


def test_the_dashboard_is_shown_and_nothing_is_sent() -> None:
    argv = [sys.executable, "-m", "slurm", "dashboard", "--project=team/mine", "--dry-run=1"]
    nowhere = environment(WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="5ec" + "0" * 36 + "7")
    shown = warm.execute(argv, env=nowhere)
    assert shown.returncode == 0, shown.stderr
    view = json.loads(shown.stdout)
    assert (view["entity"], view["project"]) == ("team", "mine")
    drawn = panels(view["spec"])
    assert drawn["training loss by samples"]["xAxis"] == "samples"
    assert drawn["test accuracy by samples"]["metrics"] == ["test_accuracy"]
    assert (
        drawn["scaling efficiency by ranks"] | {"xAxis": "config:world_size.value", "yAxis": "summary:efficiency"}
        == (drawn["scaling efficiency by ranks"])
    )
    assert {"samples per second", "share of time spent waiting for other ranks", "restarts"} <= drawn.keys()
    (runset,) = view["spec"]["section"]["runSets"]
    assert [key["name"] for key in runset["grouping"]] == ["experiment.value", "world_size.value"]


@pytest.mark.parametrize("project", ["a/b/c", "x#y", "x" * 200, "a\nb"])
def test_a_wrong_project_is_refused(project: str) -> None:
    done = inside.run_verb("dashboard", f"--project={project}", "--dry-run=1")
    assert done.returncode == 2 and "PROJECT=" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_an_account_nothing_is_sent(tmp_path: Path) -> None:
    folder = Made("mnist_pipeline", 0, 10).write(tmp_path / "runs")
    (folder.path / "wandb" / "offline-run-1").mkdir(parents=True)
    (folder.path / "wandb" / "offline-run-1" / "run.wandb").touch()
    env = environment(HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9", WANDB_ERROR_REPORTING="false")
    done = warm.execute([sys.executable, "-m", "slurm", "sync", f"--runs-folder={tmp_path / 'runs'}"], env=env)
    assert done.returncode == 2
    assert "no W&B account is configured" in done.stderr and "wandb login" in done.stderr


def test_only_runs_that_were_tracked_are_viewed(tmp_path: Path) -> None:
    folder = Made("mnist_pipeline", 0x12, 10).write(tmp_path / "runs")
    refused = inside.run_verb("leet", f"--runs-folder={tmp_path / 'runs'}")
    assert refused.returncode == 2 and "make compare" in refused.stderr
    for began in ("20261124_231721", "20261124_231905"):
        own = folder.path / "wandb" / f"offline-run-{began}-f1b54ceb"
        own.mkdir(parents=True)
        (own / "run-f1b54ceb.wandb").touch()
        (folder.path / "wandb" / "latest-run").unlink(missing_ok=True)
        (folder.path / "wandb" / "latest-run").symlink_to(own)
    merged = tmp_path / "merged"
    merged.mkdir()
    assert wandb_sync.link_wandb_logs([folder], merged) == 2
    first, second = sorted(merged.iterdir())
    assert first.name == "run-20261124_231721-0012-mnist_pipeline-1"
    assert (second / "run-0012-mnist_pipeline-2.wandb").resolve() == own / "run-f1b54ceb.wandb"
