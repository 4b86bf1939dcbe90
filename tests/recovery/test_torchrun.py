"""torchrun starts the same script, and restarts its processes after one of them has failed."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from common.runs.folder import read_json
from tests.harness.commands import execution
from tests.harness.commands.execution import Command, kill_session
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    get_only_run,
    make_environment,
    make_run_command,
    run_experiment,
    wait_until,
)
from tests.harness.pages.page_commands import TORCHRUN
from tests.harness.runs.long_runs import find_free_port, list_rank_pids
from tests.harness.runs.resuming import list_trained_steps


def torchrun() -> list[str]:
    """Return the command of torchrun for two ranks, with a free port."""
    addresses = ["--master-addr=127.0.0.1", f"--master-port={find_free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *addresses]


def test_a_restart_by_torchrun_resumes_in_the_same_folder(tmp_path: Path, digits: Settings) -> None:
    launcher = [*torchrun(), "--max-restarts=1"]
    settings = ("steps=100", "batch=16", "checkpoint.every_steps=5", "data.test_limit=100", "launch.threads=1")
    script = make_run_command("ddp_multinode", *digits, *settings, runs=tmp_path / "runs")[1:]
    launched = Command([*launcher, *script], env=make_environment(), new_session=True)

    def has_saved_or_ended() -> bool:
        return any(tmp_path.glob("runs/*/attempts/0001/checkpoints/step-*")) or launched.poll() is not None

    try:
        wait_until(has_saved_or_ended, "a checkpoint is saved")
        assert launched.poll() is None, launched.stderr
        os.kill(list_rank_pids(launched)[1], signal.SIGKILL)
        launched.wait(WAIT_TIMEOUT)
    finally:
        kill_session(launched.pid)
        launched.wait(WAIT_TIMEOUT)
    assert launched.returncode == 0, launched.stderr[-3000:]
    folder = get_only_run(tmp_path / "runs")
    assert folder.result["state"] == "finished"
    assert len(folder.list_attempts()) == 2
    assert folder.list_attempts()[1].parent_record[1] >= 5  # type: ignore[index]
    assert list_trained_steps(folder) == list(range(1, 101))


@pytest.mark.drawn
def test_torchrun_starts_the_same_script(tmp_path: Path, digits: Settings) -> None:
    without_torchrun = run_experiment("mnist_pipeline", *digits, runs=tmp_path / "without_torchrun")
    script = make_run_command("mnist_pipeline", *digits, runs=tmp_path / "torchrun")[1:]
    execution.execute_command(
        [*torchrun(), *script], env=make_environment(), timeout=WAIT_TIMEOUT, real_process=True, status=0
    )
    folder = get_only_run(tmp_path / "torchrun")
    assert len(folder.list_attempts()) == 1
    losses = [row["loss"] for row in folder.read_metrics() if "loss" in row]
    assert len(losses) == 30
    assert losses == without_torchrun.losses
    assert '"launched_by": "torchrun"' in (folder.path / "meta.json").read_text()


def test_the_command_for_two_machines_trains_on_both(tmp_path: Path, digits: tuple[str, ...]) -> None:
    """Both agents run on this machine. Each starts one rank, and the second agent differs only in --node-rank."""
    port = f"--master-port={find_free_port()}"
    page_command = TORCHRUN.replace("--master-port=29500", port).replace("<host>", "127.0.0.1")
    torchrun_options = shlex.split(page_command)[1:-1]
    settings = (*digits, "steps=4", "data.test_limit=50", "launch.threads=1")
    script = make_run_command("ddp_multinode", *settings, runs=tmp_path / "runs")[1:]
    first = [sys.executable, "-m", "torch.distributed.run", *torchrun_options, *script]
    second = ["--node-rank=1" if option == "--node-rank=0" else option for option in first]
    agents = [Command(agent, env=make_environment(), new_session=True) for agent in (first, second)]
    try:
        for agent in agents:
            agent.wait(WAIT_TIMEOUT)
    finally:
        for agent in agents:
            kill_session(agent.pid)
    assert [agent.returncode for agent in agents] == [0, 0], [agent.stderr[-3000:] for agent in agents]
    world = read_json(get_only_run(tmp_path / "runs").path / "meta.json")["world"]
    assert (world["launched_by"], world["processes"]) == ("torchrun", 2)
