"""torchrun starts the same script, and restarts its processes after one of them has failed."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

from common.runs.folder import read_json
from tests.harness.commands import warm
from tests.harness.commands.processes import PATIENCE, Settings, command, environment, run, wait_until
from tests.harness.commands.warm import Command, end_session
from tests.harness.pages.page_commands import TORCHRUN
from tests.harness.runs.long_runs import free_port, only_folder, ranks_of
from tests.harness.runs.resuming import trained_steps


def torchrun() -> list[str]:
    """Return the command of torchrun for two ranks, with a free port."""
    addresses = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *addresses]


def test_a_restart_by_torchrun_resumes_in_the_same_folder(tmp_path: Path, digits: Settings) -> None:
    launcher = [*torchrun(), "--max-restarts=1"]
    settings = ("steps=100", "batch=16", "checkpoint.every_steps=5", "data.test_limit=100", "launch.threads=1")
    script = command("ddp_multinode", *digits, *settings, runs=tmp_path / "runs")[1:]
    launched = Command([*launcher, *script], env=environment(), session=True)

    def has_saved_or_ended() -> bool:
        return any(tmp_path.glob("runs/*/attempts/0001/checkpoints/step-*")) or launched.poll() is not None

    try:
        wait_until(has_saved_or_ended, "a checkpoint is saved")
        assert launched.poll() is None, launched.err
        os.kill(ranks_of(launched)[1], signal.SIGKILL)
        launched.wait(PATIENCE)
    finally:
        end_session(launched.pid)
        launched.wait(PATIENCE)
    assert launched.returncode == 0, launched.err[-3000:]
    folder = only_folder(tmp_path / "runs")
    assert folder.result["state"] == "finished"
    assert len(folder.list_attempts()) == 2
    assert folder.list_attempts()[1].parent_record[1] >= 5  # type: ignore[index]
    assert trained_steps(folder) == list(range(1, 101))


def test_torchrun_starts_the_same_script(tmp_path: Path, digits: Settings) -> None:
    without_torchrun = run("mnist_pipeline", *digits, runs=tmp_path / "without_torchrun")
    script = command("mnist_pipeline", *digits, runs=tmp_path / "torchrun")[1:]
    warm.execute([*torchrun(), *script], env=environment(), timeout=PATIENCE, real=True, status=0)
    folder = only_folder(tmp_path / "torchrun")
    assert len(folder.list_attempts()) == 1
    losses = [row["loss"] for row in folder.read_metrics() if "loss" in row]
    assert len(losses) == 30
    assert losses == without_torchrun.losses
    assert '"launched_by": "torchrun"' in (folder.path / "meta.json").read_text()


def test_the_command_for_two_machines_trains_on_both(tmp_path: Path, digits: tuple[str, ...]) -> None:
    """Both agents run on this machine. Each starts one rank, and the second agent differs only in --node-rank."""
    port = f"--master-port={free_port()}"
    page_command = TORCHRUN.replace("--master-port=29500", port).replace("<host>", "127.0.0.1")
    torchrun_options = shlex.split(page_command)[1:-1]
    settings = (*digits, "steps=4", "data.test_limit=50", "launch.threads=1")
    script = command("ddp_multinode", *settings, runs=tmp_path / "runs")[1:]
    first = [sys.executable, "-m", "torch.distributed.run", *torchrun_options, *script]
    second = ["--node-rank=1" if option == "--node-rank=0" else option for option in first]
    agents = [Command(agent, env=environment(), session=True) for agent in (first, second)]
    try:
        for agent in agents:
            agent.wait(PATIENCE)
    finally:
        for agent in agents:
            end_session(agent.pid)
    assert [agent.returncode for agent in agents] == [0, 0], [agent.err[-3000:] for agent in agents]
    world = read_json(only_folder(tmp_path / "runs").path / "meta.json")["world"]
    assert (world["launched_by"], world["processes"]) == ("torchrun", 2)
