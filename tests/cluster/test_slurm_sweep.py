"""A sweep on a real cluster, as an array of jobs, of which a host's loss is no loss; and a repetition there."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from common.runs.folder import RunFolder, read_json
from slurm.scheduling.scheduler import choose_scheduler
from tests.harness.site import Site, until

pytestmark = pytest.mark.timeout(400)
STEPS = 300


def started(site: Site) -> list[RunFolder]:
    return [RunFolder(path.parent) for path in site.runs.glob("swept/*/config.yaml")]


def test_a_sweep_finishes_though_a_host_loses_its_power(site: Site) -> None:
    file = site.folder / "widths.yaml"
    words = site.settings("swept", f"steps={STEPS}", "stages=1", "checkpoint.every_steps=50").split("=", 1)[1].split()
    tree: dict[str, Any] = {"experiment": "mnist_pipeline", "parallel": "3"}
    tree["grid"] = {"width": ["8", "16"], "optim.lr": ["0.01", "0.02", "0.03"]}
    file.write_text(yaml.safe_dump(tree | {"settings": dict(word.split("=", 1) for word in words)}))
    done = site.call("slurm", "sweep", "--", str(file))
    assert "6 points of mnist_pipeline (6 missing); 6 to run now" in done.stdout
    assert "array of 6 jobs, at most 3 at a time" in done.stdout
    assert "_[" in site.inside("squeue", "-h", "-o", "%i").stdout, "an array, as a person expects it"
    assert "0 to run now" in site.call("slurm", "sweep", "--", str(file)).stdout, "all are submitted"
    on_2 = until("a task on node2", lambda: [f for f in started(site) if hosts(f) == ["node2"] and f.read_metrics()])
    site.call("slurm", "cluster", "power-off", "2")
    try:
        assert not on_2[0].result, "it was still running"
        until("all points", lambda: sum(bool(f.result) for f in started(site)) == 6, 240)
    finally:
        site.call("slurm", "cluster", "power-on", "2")
    folders = started(site)
    assert [f.result["state"] for f in folders] == ["finished"] * 6
    assert len(on_2[0].list_attempts()) > 1
    for folder in folders:
        steps = [row["global_step"] for row in folder.read_metrics() if "loss" in row]
        assert steps == list(range(1, STEPS + 1))
    cells = read_json(site.runs / "swept" / "sweeps" / "widths" / "sweep.json")["cells"]
    assert sorted(cell["run"] for cell in cells) == sorted(folder.path.name for folder in folders)
    again = site.call("slurm", "sweep", "--follow=1", "--", str(file))
    assert "(6 finished); 0 to run now" in again.stdout
    log = site.call("slurm", "logs", str(folders[0].path)).stdout
    assert "test accuracy" in log
    repeated = site.call("slurm", "rerun", "--", str(on_2[0].path))
    assert f"bitwise equal in {STEPS} steps" in repeated.stdout
    assert len(started(site)) == 7
    idle = ("sinfo", "-h", "-p", "main", "-n", "node2", "-o", "%T")
    until("node2 is of use again", lambda: site.inside(*idle).stdout.strip() == "idle", 90)


def test_one_look_at_the_queue_tells_of_every_task(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_DIR", str(site.folder))
    slurm = choose_scheduler("slurm")
    assert slurm is not None
    words = ("sbatch", "--parsable", "--array=0-3%1", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    job = site.inside(*words).stdout.strip()
    until("the first task", lambda: slurm.read_job_state(f"{job}_0")[0] == "RUNNING")
    found = slurm.read_queue()
    mine = {task: words for task, words in found.items() if task.startswith(f"{job}_")}
    assert {task.rpartition("_")[2]: words.partition("|")[0] for task, words in mine.items()} == {
        "0": "RUNNING", "1": "PENDING", "2": "PENDING", "3": "PENDING"
    }  # fmt: skip
    assert "JobArrayTaskLimit" in slurm.read_job_state(f"{job}_2")[1]
    site.inside("scancel", job)
    until("they are cancelled", lambda: slurm.read_job_state(f"{job}_2")[0] == "CANCELLED")


def hosts(folder: RunFolder) -> list[str]:
    """Where the newest start of a run is."""
    attempts = folder.list_attempts()
    return list(read_json(attempts[-1].attempt_folder / "world.json").get("hosts", [])) if attempts else []
