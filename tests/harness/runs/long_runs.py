"""Start runs that would train for minutes, and stop them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from common.checkpoint import storage
from common.system.exit_status import EXIT_RESUMABLE
from slurm.reports.heartbeats import read_heartbeats
from tests.harness.commands.execution import Command, start_command
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    find_processes,
    get_only_run,
    make_environment,
    make_run_command,
    read_forked_command,
    wait_until,
)
from tests.harness.environment.randomness import create_random
from tests.harness.experiments.registry import Entry

ENDLESS_SETTINGS = ("steps=0", "epochs=5000", "checkpoint.every_steps=0")


@contextlib.contextmanager
def start_long_run(name: str, *settings: str, runs: Path, real_process: bool = False, **env: str) -> Iterator[Command]:
    """Start an experiment in a new session, and wait for the first row of metrics. Kill it after the block."""
    argv = make_run_command(name, *settings, runs=runs)
    with start_command(argv, env=make_environment(**env), real_process=real_process) as process:
        wait_until(lambda: has_metrics(runs) or process.poll() is not None, "the run trains")
        assert process.poll() is None, process.stdout + process.stderr
        yield process


def has_metrics(runs: Path) -> bool:
    """Return whether a run in a folder has written metrics."""
    return any(file.stat().st_size for file in runs.glob("*/attempts/0001/metrics.jsonl"))


def find_free_port() -> int:
    """Return a port of this host that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def list_rank_pids(process: Command) -> list[int]:
    """Return the process IDs of the ranks of a run, in the order of ranks.

    `process` is the launcher: the script of the experiment, or torchrun. Ranks execute the same Python interpreter as
    the launcher. Its other children are the tracking process and other programs, such as git.
    """
    launcher = Path(f"/proc/{process.pid}")
    interpreter = (launcher / "exe").readlink()
    ranks = []
    for pid in (launcher / "task" / f"{process.pid}" / "children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the child has exited in the meantime
            entry = Path(f"/proc/{pid}")
            command_line = (entry / "cmdline").read_bytes() + read_forked_command(entry)
            is_tracking = b"common.runs.tracking.wandb_process" in command_line
            if (entry / "exe").readlink() == interpreter and not is_tracking:
                ranks.append(int(pid))
    return ranks


def check_stop_request(entry: Entry, number: signal.Signals, quick: tuple[str, ...], runs: Path) -> None:
    """Send a stop request at a random time in training. The run saves its last step, reports it, and exits."""
    settings = (*quick, *entry.make_rank_settings(2), *ENDLESS_SETTINGS)
    delay = create_random(f"{entry.name}-{number.name}").random()
    with start_long_run(entry.name, *settings, runs=runs) as process:
        time.sleep(delay)
        process.send_signal(number)
        out, err = process.communicate(WAIT_TIMEOUT)
        is_interrupt = number == signal.SIGINT
        assert process.returncode == (128 + number if is_interrupt else EXIT_RESUMABLE), out + err
        assert "Traceback" not in err, err
        assert "resume with: make exp RESUME=" in err, err
        folder = get_only_run(runs)
        (checkpoint,) = storage.list_resumable_checkpoints(folder)
        assert checkpoint.step == max(row["global_step"] for row in folder.read_metrics()), "a step was lost"
        beats = read_heartbeats(folder.list_attempts()[0])
        assert [beat.step for beat in beats] == [checkpoint.step] * 2, "the doctor must show the newest step"
        assert folder.result["state"] == ("cancelled" if is_interrupt else "preempted"), folder.result
        assert not list(folder.path.rglob("failure-*.json")), "a stop request is not a failure"
        assert not find_processes(str(runs))


def check_killed_rank(process: Command, runs: Path) -> None:
    """Kill rank 1 in training. The run ends, names it, and leaves no process."""
    os.kill(list_rank_pids(process)[1], signal.SIGKILL)
    _, err = process.communicate(WAIT_TIMEOUT)
    assert process.returncode == 128 + signal.SIGKILL, err
    assert "error: rank 1 (pid" in err, err
    assert "killed by SIGKILL" in err, err
    assert "Traceback" not in err, err
    assert not find_processes(str(runs))


def check_hanging_rank(entry: Entry, quick: tuple[str, ...], runs: Path, seconds: int = 5) -> None:
    """Stop the process of rank 1. The run ends and names this rank, and the log of rank 0 shows where it waited."""
    settings = (*quick, *entry.make_rank_settings(2), *ENDLESS_SETTINGS, f"launch.step_timeout={seconds}")
    with start_long_run(entry.name, *settings, runs=runs) as process:
        os.kill(list_rank_pids(process)[1], signal.SIGSTOP)
        out, err = process.communicate(WAIT_TIMEOUT)
        assert process.returncode == 1, out + err
        assert "rank 1 on" in err, err
        assert f"did not answer within {seconds} s" in err, err
        log_of_rank_0 = get_only_run(runs).list_attempts()[0].log_file(0)
        assert "most recent call first" in log_of_rank_0.read_text()
        assert not find_processes(str(runs))
