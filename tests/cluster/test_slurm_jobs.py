"""Experiments on a real SLURM cluster of two hosts, through the commands that a user types."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.config import config
from common.runs.folder import RunFolder, read_json
from tests.harness.commands.processes import read_result_values, run_experiment, select_applicable_settings
from tests.harness.custom_code.examples import write_example
from tests.harness.environment.randomness import draw_cases
from tests.harness.experiments.registry import ENTRIES, REPLICATED_ENTRY, Entry
from tests.harness.slurm.cluster_site import HIGH_PRIORITY, Site, start_cluster, wait_on_cluster

pytestmark = pytest.mark.timeout(300)
FINAL_ROWS = {True: "test loss", False: "bytes sent"}  # a row of the final table, if the experiment trains or not
SECRET = "0123456789abcdef" * 2 + "01234567"  # as one literal, the snapshot of this file would contain it


def submit_and_follow(site: Site, name: str, runs: str, *settings: str, nodes: int = 2) -> str:
    """Submit a run, follow it until it has finished, and return the output."""
    process = site.submit(name, runs, *settings, options=(f"--nodes={nodes}", "--follow=1"))
    check_success(process)
    return process.stdout


def check_success(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stdout + process.stderr


def read_world(folder: RunFolder) -> dict[str, Any]:
    """Return the hosts and ranks in the metadata of a run."""
    world: dict[str, Any] = read_json(folder.path / "meta.json")["world"]
    return world


def check_same_losses(name: str, folder: RunFolder, runs: Path) -> RunFolder:
    """Repeat a run of a job on this machine, compare all losses to the bit, and return the repeated run."""
    local = run_experiment(name, "--config", str(folder.path / "config.yaml"), "launch.threads=1", runs=runs)
    assert local.returncode == 0, local.stderr
    assert [row["loss"] for row in folder.read_metrics() if "loss" in row] == local.losses
    return local.folder


@pytest.mark.parametrize("entry", draw_cases("jobs", ENTRIES, 5), ids=lambda entry: entry.name)
def test_a_job_on_two_hosts_reproduces_a_local_run(site: Site, entry: Entry, tmp_path: Path) -> None:
    settings = (*entry.smallest_settings, "steps=30", "epochs=1")
    output = submit_and_follow(site, entry.name, f"two-{entry.name}", *settings)
    assert "on the local cluster, 2 nodes, 2 ranks" in output
    assert FINAL_ROWS[entry.trains_model] in output
    folder = site.get_only_run(f"two-{entry.name}")
    meta = read_json(folder.path / "meta.json")
    assert meta["world"]["hosts"] == ["node1", "node2"]
    assert meta["world"]["launched_by"] == "slurm"
    assert meta["history"][0]["state"] == "finished"
    assert meta["history"][0]["slurm"]["SLURM_JOB_ID"]
    assert "#SBATCH --nodes=2" in (folder.path / "submit" / "job.sh").read_text()
    assert "FINISHED" in site.execute_module("slurm", "status", str(folder.path)).stdout
    assert FINAL_ROWS[entry.trains_model] in site.execute_module("slurm", "logs", str(folder.path)).stdout
    local_folder = check_same_losses(entry.name, folder, tmp_path / "local")
    both_runs = f"--runs={folder.path} {local_folder.path}"
    report = json.loads(
        site.execute_module("slurm", "compare", f"--runs-folder={tmp_path}", both_runs, "--json=1").stdout
    )
    for compared in report["runs"]:
        assert (compared["state"], compared["step"], compared["processes"]) == ("finished", 30, 2)
    of_job, of_local_run = report["runs"]
    assert of_job["test_loss"] == of_local_run["test_loss"]
    assert (of_job["test_loss"] is not None) == entry.trains_model
    page = tmp_path / "page.html"
    site.execute_module("slurm", "compare", f"--runs-folder={tmp_path}", both_runs, f"--page={page}")
    assert '_0_log.out">job</a>' in page.read_text()


def test_replicas_span_the_hosts_and_stages_do_not(site: Site, tmp_path: Path) -> None:
    """The connection is encrypted, and its algorithms are measured between these hosts."""
    settings = ["width=8", "batch=16", "split_size=4", "replicas=2", "plot=false", "steps=20"]
    settings += ["launch.backend=builtin", "launch.tls=true", "launch.algorithm=auto"]
    output = submit_and_follow(site, "resnet_modelparallel", "replicas", *settings)
    folder = site.get_only_run("replicas")
    world = read_world(folder)
    assert world["hosts"] == ["node1", "node1", "node2", "node2"]
    assert world["tls"] is True
    assert "launch.algorithm=auto: " in output
    assert config.read_settings(folder.path)["launch.algorithm"] != "auto"
    assert not list(folder.path.glob(".private*"))
    check_same_losses("resnet_modelparallel", folder, tmp_path)


@pytest.fixture
def four(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    """A cluster of four hosts, and a checkout on it."""
    with start_cluster(Site(tmp_path_factory.mktemp("four"), cache, HIGH_PRIORITY), "--nodes=4") as four_hosts:
        yield four_hosts


def test_experiments_span_four_hosts(four: Site) -> None:
    """Each host has a rank; a result that depends on the number of hosts is that of four."""
    tested = []
    for entry in ENTRIES:
        if not entry.is_correct_on_four_hosts:
            continue
        output = submit_and_follow(four, entry.name, entry.name, *entry.smallest_settings, "steps=12", nodes=4)
        folder = four.get_only_run(entry.name)
        assert read_world(folder)["hosts"] == ["node1", "node2", "node3", "node4"]
        assert FINAL_ROWS[entry.trains_model] in output
        assert entry.is_correct_on_four_hosts(read_result_values(folder))
        tested.append(entry.name)
    if not tested:
        pytest.skip("no experiment has a result that depends on the number of hosts")


def test_two_jobs_run_at_once_and_can_be_cancelled(site: Site) -> None:
    for name in ("first", "second"):
        check_success(site.submit("mnist_pipeline", name, "epochs=500", options=("--nodes=1",)))
    folders = [site.get_only_run(name) for name in ("first", "second")]
    for folder in folders:
        site.wait_for_state(folder, "RUNNING")
    runs = f"--runs={folders[0].path} {folders[1].path}"
    output = site.execute_module("slurm", "compare", f"--runs-folder={site.folder}", runs).stdout
    assert output.count("  running  ") == 2
    assert output.count(" RUNNING: job ") == 2
    for folder in folders:
        assert "canceled job" in site.execute_module("slurm", "cancel", str(folder.path)).stdout
        site.wait_for_state(folder, "CANCELLED")
        site.wait_for_exit(folder)


def test_later_edits_do_not_change_a_submitted_run(site: Site) -> None:
    name = REPLICATED_ENTRY.name
    network_file = write_example(site.folder, "residual.py")
    loss_file = write_example(site.folder, "focal.py")
    custom_code = (f"model={network_file}:ResidualNet", f"loss={loss_file}:focal_loss")
    sources = [site.checkout / "experiments" / f"{name}.py", site.checkout / "common" / "training" / "evaluate.py"]
    texts = [file.read_text() for file in sources]
    try:
        with site.occupy_hosts():
            check_success(site.submit(name, "edited", "steps=10", *custom_code))
            for file in (*sources, network_file, loss_file):
                file.write_text("raise RuntimeError('edited after submission')\n")
            folder = site.get_only_run("edited")
            assert not folder.list_attempts(), "the run waits for the hosts"
        wait_on_cluster("the run has ended", lambda: folder.result)
    finally:
        for file, text in zip(sources, texts, strict=True):
            file.write_text(text)
    assert folder.result.get("state") == "finished"
    assert read_json(folder.path / "model.json")["class"] == "ResidualNet"


def test_a_run_is_submitted_from_inside_an_allocation(site: Site) -> None:
    command = [
        sys.executable,
        "-m",
        "slurm",
        "exp",
        site.format_settings_option("inside", "steps=10"),
        "--nodes=2",
        "--follow=1",
    ]
    check_success(site.execute_in_cluster("salloc", "--nodes=1", "--ntasks=1", *command, "--", "mnist_pipeline"))
    assert site.get_only_run("inside").result["state"] == "finished"


def list_settings(site: Site, runs: str) -> list[str]:
    return site.format_settings_option(runs, "steps=10").removeprefix("--args=").split()


@pytest.mark.parametrize("entry", draw_cases("srun", ENTRIES, 3), ids=lambda entry: entry.name)
def test_srun_starts_an_experiments_script(site: Site, entry: Entry) -> None:
    runs = f"srun-{entry.name}"
    settings = select_applicable_settings(
        entry.name, [*list_settings(site, runs), *entry.smallest_settings, "launch.nodes=2"]
    )
    script = [sys.executable, f"experiments/{entry.name}.py", *settings]
    check_success(site.execute_in_cluster("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *script))
    assert read_world(site.get_only_run(runs))["hosts"] == ["node1", "node2"]


def test_a_custom_script_that_is_requeued_continues_in_the_same_folder(site: Site) -> None:
    settings = list_settings(site, "own-script")
    settings += ["steps=200", "epochs=50", "checkpoint.every_steps=20", "launch.nodes=2"]
    command = shlex.join([sys.executable, "experiments/mnist_pipeline.py", *settings])
    script = site.folder / "job.sh"
    script.write_text(f"#!/bin/sh\ncd {shlex.quote(str(site.checkout))}\nsrun --kill-on-bad-exit=1 {command}\n")
    options = ("--nodes=2", "--ntasks-per-node=1", "--requeue", f"--output={site.folder}/own-script.out")
    job = site.execute_in_cluster("sbatch", "--parsable", *options, str(script)).stdout.strip()
    wait_on_cluster("a checkpoint", lambda: list(site.runs.glob("own-script/*/attempts/0001/checkpoints/step-*")))
    site.execute_in_cluster("scontrol", "requeue", job)
    wait_on_cluster("the end", lambda: site.get_only_run("own-script").result.get("state") == "finished")
    folder = site.get_only_run("own-script")
    _, second_attempt = folder.list_attempts()
    assert second_attempt.parent_record
    assert second_attempt.parent_record[1] >= 20
    assert [row["global_step"] for row in folder.read_metrics() if "loss" in row] == list(range(1, 201))


def test_torchrun_takes_precedence_over_slurm_inside_an_allocation(site: Site) -> None:
    script = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    script += ["--master-port=29511", "experiments/ddp_multinode.py", *list_settings(site, "torchrun")]
    check_success(site.execute_in_cluster("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", *script))
    world = read_world(site.get_only_run("torchrun"))
    assert world["launched_by"] == "torchrun"
    assert world["processes"] == 2


@pytest.mark.parametrize(
    "settings, nodes, message",
    [
        ((), 4, "cannot be divided evenly"),
        (("stages=3",), 3, "NODES=3, but the local cluster has 2 hosts"),
        (("cluster.partition=nowhere",), 2, "has no partition nowhere"),
        ((), 0, "must be an integer from 1 to"),
    ],
)
def test_an_impossible_job_is_refused(site: Site, settings: tuple[str, ...], nodes: int, message: str) -> None:
    process = site.submit("mnist_pipeline", "refused", "depth=5", *settings, options=(f"--nodes={nodes}",))
    assert process.returncode == 2
    assert message in process.stderr
    assert process.stderr.count("error: ") <= 2
    assert "Traceback" not in process.stderr
    assert not list((site.runs / "refused").glob("*"))


def test_secrets_stay_in_the_environment(site: Site) -> None:
    options = ("--nodes=2", "--follow=1")
    environ = {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"}
    process = site.submit("mnist_pipeline", "secret", "steps=10", options=options, **environ)
    check_success(process)
    assert SECRET not in process.stdout + process.stderr
    for path in site.get_only_run("secret").path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
