"""A sweep on a real cluster as an array of jobs, which survives the loss of a host, and a repeated run there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from common.runs.folder import RunFolder, read_json
from slurm.scheduling.scheduler import choose_scheduler
from tests.harness.slurm.cluster_site import Site, wait_on_cluster

pytestmark = pytest.mark.timeout(400)
STEPS = 300


def list_runs(site: Site, name: str = "swept") -> list[RunFolder]:
    """Return the folders of all runs of a sweep that have been created."""
    return [RunFolder(path.parent) for path in site.runs.glob(f"{name}/*/config.yaml")]


def write_sweep(site: Site, name: str = "swept", steps: int = STEPS, **grid: list[str]) -> Path:
    """Write a sweep, by default of six points; return its file. Its runs will be in the folder `name`."""
    epochs = -(-steps // 900)  # an epoch has 937 steps
    settings = site.format_settings_option(
        name, f"steps={steps}", f"epochs={epochs}", "stages=1", "checkpoint.every_steps=50"
    )
    sweep = {
        "experiment": "mnist_pipeline",
        "parallel": "3",
        "grid": grid or {"width": ["8", "16"], "optim.lr": ["0.01", "0.02", "0.03"]},
        "settings": dict(setting.split("=", 1) for setting in settings.removeprefix("--args=").split()),
    }
    file = site.folder / ("widths.yaml" if name == "swept" else f"{name}.yaml")
    file.write_text(yaml.safe_dump(sweep))
    return file


def find_training_run(site: Site, host: str) -> RunFolder | None:
    """Return a run that trains on a host."""
    for folder in list_runs(site):
        if read_hosts(folder) == [host] and folder.read_metrics():
            return folder
    return None


def test_a_sweep_finishes_although_a_host_loses_power(site: Site) -> None:
    file = write_sweep(site)
    output = site.execute_module("slurm", "sweep", "--", str(file)).stdout
    assert "6 points of mnist_pipeline (6 missing); 6 to run now" in output
    assert "array of 6 jobs, at most 3 at a time" in output
    assert "_[" in site.execute_in_cluster("squeue", "-h", "-o", "%i").stdout, "squeue does not show an array"
    assert "0 to run now" in site.execute_module("slurm", "sweep", "--", str(file)).stdout, "not all runs are submitted"
    struck = wait_on_cluster("a task on node2", lambda: find_training_run(site, "node2"))
    site.execute_module("slurm", "cluster", "power-off", "2")
    try:
        assert not struck.result, "the run had ended before"
        wait_on_cluster("all points", lambda: sum(bool(folder.result) for folder in list_runs(site)) == 6, 240)
    finally:
        site.execute_module("slurm", "cluster", "power-on", "2")
    folders = list_runs(site)
    assert len(folders) == 6
    assert len(struck.list_attempts()) > 1
    for folder in folders:
        assert folder.result["state"] == "finished"
        steps = [row["global_step"] for row in folder.read_metrics() if "loss" in row]
        assert steps == list(range(1, STEPS + 1))
    cells = read_json(site.runs / "swept" / "sweeps" / "widths" / "sweep.json")["cells"]
    assert sorted(cell["run"] for cell in cells) == sorted(folder.path.name for folder in folders)
    output = site.execute_module("slurm", "sweep", "--follow=1", "--", str(file)).stdout
    assert "(6 finished); 0 to run now" in output
    log = site.execute_module("slurm", "logs", str(folders[0].path)).stdout
    assert "test accuracy" in log
    repeated = site.execute_module("slurm", "rerun", "--", str(struck.path))
    assert f"bitwise equal in {STEPS} steps" in repeated.stdout
    assert len(list_runs(site)) == 7
    node_state = ("sinfo", "-h", "-p", "main", "-n", "node2", "-o", "%T")
    wait_on_cluster("node2 is idle", lambda: site.execute_in_cluster(*node_state).stdout.strip() == "idle")


def test_only_the_stopped_task_of_an_array_is_requeued(site: Site) -> None:
    """SLURM_JOB_ID of one task equals the id of the array, and SLURM applies commands for that id to all tasks."""
    file = write_sweep(site, "stopped", steps=4000, width=["8", "16"])
    site.execute_module("slurm", "sweep", "--", str(file))
    wait_on_cluster("both tasks", lambda: all(folder.read_metrics() for folder in list_runs(site, "stopped")))
    listing = site.execute_in_cluster("squeue", "-h", "-r", "-o", "%i %A").stdout.split()
    task_of_job = dict(zip(listing[1::2], listing[::2], strict=True))
    folders = {read_json(folder.path / "meta.json")["job"]["id"]: folder for folder in list_runs(site, "stopped")}
    array = next(iter(folders)).partition("_")[0]
    site.execute_in_cluster("scancel", "--signal=USR2", task_of_job[array])
    wait_on_cluster("both results", lambda: all(folder.result for folder in folders.values()))
    for task, folder in folders.items():
        assert folder.result["state"] == "finished"
        assert len(folder.list_attempts()) == (2 if task == task_of_job[array] else 1), task


def test_one_query_of_the_queue_returns_every_task(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_DIR", str(site.folder))
    slurm = choose_scheduler("slurm")
    assert slurm is not None
    command = ("sbatch", "--parsable", "--array=0-3%1", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    job = site.execute_in_cluster(*command).stdout.strip()
    wait_on_cluster("the first task", lambda: slurm.read_job_state(f"{job}_0")[0] == "RUNNING")
    states = {}
    for task, description in slurm.read_queue().items():
        if task.startswith(f"{job}_"):
            states[task.removeprefix(f"{job}_")] = description.partition("|")[0]
    assert states == {"0": "RUNNING", "1": "PENDING", "2": "PENDING", "3": "PENDING"}
    assert "JobArrayTaskLimit" in slurm.read_job_state(f"{job}_2")[1]
    site.execute_in_cluster("scancel", job)
    wait_on_cluster("the tasks are cancelled", lambda: slurm.read_job_state(f"{job}_2")[0] == "CANCELLED")


def read_hosts(folder: RunFolder) -> list[str]:
    """Return the hosts of the newest attempt of a run."""
    attempts = folder.list_attempts()
    return list(read_json(attempts[-1].attempt_folder / "world.json").get("hosts", [])) if attempts else []
