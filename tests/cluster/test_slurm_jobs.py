"""Experiments on a real SLURM cluster of two hosts, through the commands that a person types."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import config
from tests.harness.processes import applicable, run, values_of
from tests.harness.registry import EXPERIMENTS, Entry
from tests.harness.site import FIRST, Site, until, up

pytestmark = pytest.mark.timeout(300)
every = pytest.mark.parametrize("entry", EXPERIMENTS, ids=lambda entry: entry.name)
LAST = {True: "test accuracy", False: "bytes sent"}  # a row of the final table
SECRET = "0123456789abcdef" * 2 + "01234567"  # in one piece it would stand in the snapshot of this file


@every
def test_a_job_on_two_hosts_has_the_numbers_of_a_local_run(site: Site, entry: Entry, tmp_path: Path) -> None:
    words = (*entry.smallest, "steps=30", "epochs=1")
    done = site.submit(entry.name, f"two-{entry.name}", *words, options=("--nodes=2", "--follow=1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on the local cluster, 2 nodes, 2 ranks" in done.stdout and LAST[entry.trains] in done.stdout
    folder = site.run_of(f"two-{entry.name}")
    meta = json.loads((folder.path / "meta.json").read_text())
    assert meta["world"]["hosts"] == ["node1", "node2"] and meta["world"]["launched_by"] == "slurm"
    assert meta["history"][0]["state"] == "finished" and meta["history"][0]["slurm"]["SLURM_JOB_ID"]
    assert "#SBATCH --nodes=2" in (folder.path / "submit" / "job.sh").read_text()
    assert "FINISHED" in site.call("slurm", "status", str(folder.path)).stdout
    assert LAST[entry.trains] in site.call("slurm", "logs", str(folder.path)).stdout
    local = run(entry.name, "--config", str(folder.path / "config.yaml"), "launch.threads=1", runs=tmp_path / "local")
    assert local.status == 0, local.err
    assert [row["loss"] for row in folder.read_metrics() if "loss" in row] == local.losses
    both = f"--runs={folder.path} {local.folder.path}"
    compared = json.loads(site.call("slurm", "compare", f"--runs-folder={tmp_path}", both, "--json=1").stdout)
    assert [(one["state"], one["step"], one["processes"]) for one in compared["runs"]] == [("finished", 30, 2)] * 2
    assert compared["runs"][0]["test_loss"] == compared["runs"][1]["test_loss"]
    assert (compared["runs"][0]["test_loss"] is not None) == entry.trains
    page = tmp_path / "page.html"
    site.call("slurm", "compare", f"--runs-folder={tmp_path}", both, f"--page={page}")
    assert '_0_log.out">job</a>' in page.read_text()


def test_replicas_go_across_the_hosts_and_stages_do_not(site: Site, tmp_path: Path) -> None:
    """Encrypted, and with algorithms that were measured between these hosts."""
    own = ("launch.backend=builtin", "launch.tls=true", "launch.algorithm=auto")
    words = ("width=8", "batch=16", "split_size=4", "replicas=2", "plot=false", "steps=20", *own)
    done = site.submit("resnet_modelparallel", "replicas", *words, options=("--nodes=2", "--follow=1"))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = site.run_of("replicas")
    world = json.loads((folder.path / "meta.json").read_text())["world"]
    assert world["hosts"] == ["node1", "node1", "node2", "node2"] and world["tls"] is True
    assert "launch.algorithm=auto: " in done.stdout
    assert config.read_settings(folder.path)["launch.algorithm"] != "auto"
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".private")]
    local = run("resnet_modelparallel", "--config", str(folder.path / "config.yaml"), "launch.threads=1", runs=tmp_path)
    assert local.status == 0, local.err
    assert [row["loss"] for row in folder.read_metrics() if "loss" in row] == local.losses


@pytest.fixture
def four(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    """A cluster of four hosts, and a checkout on it."""
    with up(Site(tmp_path_factory.mktemp("four"), cache, FIRST), "--nodes=4") as found:
        yield found


def test_experiments_go_across_four_hosts(four: Site) -> None:
    """Each host has a rank; a result that depends on the number of hosts is that of four."""
    for entry in (entry for entry in EXPERIMENTS if entry.check_four_hosts):
        done = four.submit(entry.name, entry.name, *entry.smallest, "steps=12", options=("--nodes=4", "--follow=1"))
        assert done.returncode == 0, done.stdout + done.stderr
        world = json.loads((four.run_of(entry.name).path / "meta.json").read_text())["world"]
        assert world["hosts"] == [f"node{number}" for number in range(1, 5)] and LAST[entry.trains] in done.stdout
        assert entry.check_four_hosts and entry.check_four_hosts(values_of(four.run_of(entry.name)))


def test_two_jobs_run_at_once_and_can_be_cancelled(site: Site) -> None:
    for name in ("first", "second"):
        done = site.submit("mnist_pipeline", name, "epochs=500", options=("--nodes=1",))
        assert done.returncode == 0, done.stderr
    folders = [site.run_of(name) for name in ("first", "second")]
    for folder in folders:
        site.wait(folder, "RUNNING")
    shown = site.call(
        "slurm", "compare", f"--runs-folder={site.folder}", f"--runs={folders[0].path} {folders[1].path}"
    ).stdout
    assert shown.count("  running  ") == 2 and shown.count(" RUNNING: job ") == 2
    for folder in folders:
        assert "canceled job" in site.call("slurm", "cancel", str(folder.path)).stdout
        site.wait(folder, "CANCELLED")
        site.gone(folder)


def test_what_was_submitted_runs_whatever_is_edited_later(site: Site) -> None:
    files = [site.checkout / "experiments" / "mnist_pipeline.py", site.checkout / "common" / "training" / "evaluate.py"]
    texts = [file.read_text() for file in files]
    try:
        with site.busy():
            done = site.submit("mnist_pipeline", "edited", "steps=10")
            assert done.returncode == 0, done.stderr
            for file in files:
                file.write_text("raise RuntimeError('edited after submission')\n")
            folder = site.run_of("edited")
            assert not folder.list_attempts(), "it waits for the hosts"
        until("it has ended", lambda: folder.result)
    finally:
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
    assert folder.result.get("state") == "finished"


def test_a_run_is_submitted_from_inside_an_allocation(site: Site) -> None:
    words = [
        sys.executable,
        "-m",
        "slurm",
        "exp",
        site.settings("inside", "steps=10"),
        "--nodes=2",
        "--follow=1",
    ]
    done = site.inside("salloc", "--nodes=1", "--ntasks=1", *words, "--", "mnist_pipeline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.run_of("inside").result["state"] == "finished"


def settings_words(site: Site, runs: str) -> list[str]:
    return site.settings(runs, "steps=10").removeprefix("--args=").split()


@every
def test_srun_starts_an_experiments_script(site: Site, entry: Entry) -> None:
    words = applicable(entry.name, [*settings_words(site, f"srun-{entry.name}"), *entry.smallest, "launch.nodes=2"])
    script = [sys.executable, f"experiments/{entry.name}.py", *words]
    done = site.inside("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    meta = json.loads((site.run_of(f"srun-{entry.name}").path / "meta.json").read_text())
    assert meta["world"]["hosts"] == ["node1", "node2"]


def test_a_script_of_ones_own_that_is_queued_again_goes_on_in_the_same_folder(site: Site) -> None:
    words = [
        *settings_words(site, "own-script"),
        "steps=200",
        "epochs=50",
        "checkpoint.every_steps=20",
        "launch.nodes=2",
    ]
    command = shlex.join([sys.executable, "experiments/mnist_pipeline.py", *words])
    script = site.folder / "job.sh"
    script.write_text(f"#!/bin/sh\ncd {shlex.quote(str(site.checkout))}\nsrun --kill-on-bad-exit=1 {command}\n")
    options = ("--nodes=2", "--ntasks-per-node=1", "--requeue", f"--output={site.folder}/own-script.out")
    job = site.inside("sbatch", "--parsable", *options, str(script)).stdout.strip()
    until("a checkpoint", lambda: list(site.runs.glob("own-script/*/attempts/0001/checkpoints/step-*")))
    site.inside("scontrol", "requeue", job)
    until("the end", lambda: site.run_of("own-script").result.get("state") == "finished", 120)
    folder = site.run_of("own-script")
    assert len(folder.list_attempts()) == 2 and folder.list_attempts()[1].parent_record[1] >= 20  # type: ignore[index]
    assert [row["global_step"] for row in folder.read_metrics() if "loss" in row] == list(range(1, 201))


def test_torchrun_goes_before_slurm_inside_an_allocation(site: Site) -> None:
    script = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    script += ["--master-port=29511", "experiments/ddp_multinode.py", *settings_words(site, "torchrun")]
    done = site.inside("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    world = json.loads((site.run_of("torchrun").path / "meta.json").read_text())["world"]
    assert world["launched_by"] == "torchrun" and world["processes"] == 2


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ((), ("--nodes=4",), "cannot be divided evenly"),
        (("stages=3",), ("--nodes=3",), "NODES=3, but the local cluster has 2 hosts"),
        (("cluster.partition=nowhere",), ("--nodes=2",), "has no partition nowhere"),
        ((), ("--nodes=0",), "must be an integer from 1 to"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused(
    site: Site, words: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    done = site.submit("mnist_pipeline", "refused", "depth=5", *words, options=options)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("error: ") <= 2 and "Traceback" not in done.stderr
    assert not list((site.runs / "refused").glob("*"))


def test_secrets_stay_in_the_environment(site: Site) -> None:
    done = site.submit(
        "mnist_pipeline",
        "secret",
        "steps=10",
        WANDB_API_KEY=SECRET,
        WANDB_MODE="offline",
        options=("--nodes=2", "--follow=1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    for path in site.run_of("secret").path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
