"""Choice of a scheduler, and calls of SLURM's commands."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from common.system.errors import UserError
from common.system.processes import Process
from slurm.local_cluster import cluster
from slurm.reports.status import find_scheduler
from slurm.scheduling import scheduler
from slurm.scheduling.scheduler import choose_scheduler
from tests.harness.slurm.fake_slurm import FakeSlurm
from tests.unit.slurm.local_cluster.cluster_command import PLAN, run_cluster_command


def test_jobs_inherit_no_variables_of_another_launcher() -> None:
    environ = {
        "SLURM_CPU_BIND": "quiet", "SLURM_MEM_PER_NODE": "1", "SLURM_CONF": "/c", "SBATCH_PARTITION": "x", "RANK": "0",
        "TORCHELASTIC_RUN_ID": "1", "HOME": "/h", "WANDB_API_KEY": "k", "PATH": "/bin",
    }  # fmt: skip
    inherited = {"SLURM_CONF": "/c", "HOME": "/h", "WANDB_API_KEY": "k", "PATH": "/bin"}
    assert scheduler.remove_launcher_variables(environ) == inherited


def test_a_command_without_an_answer_times_out(fake_here: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_here.define_command("scontrol", "exec sleep 60")
    monkeypatch.setattr(scheduler, "COMMAND_TIMEOUT", 0.5)
    with pytest.raises(UserError, match="scontrol did not answer within"):
        scheduler.Scheduler("SLURM").check_enough_hosts(1, "")


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the local clusters."""
    monkeypatch.setenv("CLUSTER_DIR", str(tmp_path))
    return tmp_path


def record_cluster(name: str, *, is_up: bool = True) -> None:
    """Write the files of a local cluster whose first process is this one, or one that has ended."""
    process = Process.identify(os.getpid())
    if not is_up:
        process = process._replace(start=process.start - 1)
    folder = cluster.find_cluster_folder(name)
    folder.mkdir()
    replace(PLAN, name=name, folder=folder).save()
    process.save(folder / "holder")


def check_chosen_cluster(launch: str, scheduler_name: str, cluster_name: str) -> None:
    """Check which local cluster LAUNCH chooses, and that the name in meta.json leads to it."""
    chosen_scheduler = choose_scheduler(launch)
    assert chosen_scheduler
    assert chosen_scheduler.local
    assert chosen_scheduler.name == scheduler_name
    assert chosen_scheduler.local.plan.name == cluster_name
    assert find_scheduler({"job": {"scheduler": scheduler_name}}) == chosen_scheduler


def test_a_cluster_whose_first_process_has_ended_is_not_chosen(clusters: Path) -> None:
    assert cluster.choose_running_cluster() is None
    record_cluster("ended", is_up=False)
    assert cluster.choose_running_cluster() is None
    assert choose_scheduler("local") is None
    with pytest.raises(UserError, match="cluster ended is not up; start it with: make cluster-up NAME=ended"):
        choose_scheduler("slurm:ended")


def test_the_only_running_cluster_is_chosen(clusters: Path) -> None:
    record_cluster("ended", is_up=False)
    record_cluster("first")
    check_chosen_cluster("auto", "the local cluster first", "first")
    assert find_scheduler({"job": {"scheduler": "the local cluster"}}) is None, "the default cluster is another one"
    process = run_cluster_command("down", "--name=nosuch", CLUSTER_DIR=str(clusters), status=2)
    assert process.stderr == "error: cluster nosuch is not up; running clusters: first\n"


def test_one_of_several_running_clusters_is_chosen_by_its_name(clusters: Path) -> None:
    record_cluster("first")
    record_cluster("second")
    with pytest.raises(UserError, match="clusters are up: first, second; choose one, such as LAUNCH=slurm:first "):
        choose_scheduler("auto")
    check_chosen_cluster("slurm:second", "the local cluster second", "second")
    record_cluster("local")
    check_chosen_cluster("slurm", "the local cluster", "local")


@pytest.mark.parametrize("launch", ["slurm:", "local:first", "first"])
def test_unknown_values_of_launch_are_refused(launch: str, clusters: Path) -> None:
    record_cluster("first")
    with pytest.raises(UserError, match=f"LAUNCH={launch} is unknown; use auto, local, slurm, or slurm:NAME"):
        choose_scheduler(launch)
