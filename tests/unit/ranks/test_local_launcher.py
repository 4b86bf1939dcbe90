"""The local launcher reports one clear error and stops all ranks, whatever ends the run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.ranks.local_launcher import RankForker
from common.ranks.rank_info import RankInfo
from common.ranks.rank_monitor import ChildRank, reap_child
from common.system.errors import UserError
from common.system.exit_status import EXIT_RESUMABLE
from common.system.signals import STOP_SIGNALS
from slurm.reports import status
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    find_processes,
    get_only_run,
    run_experiment,
    wait_until,
)
from tests.harness.environment.control_groups import CGROUP_ROOT, create_control_group
from tests.harness.ranks.programs import execute_launch_case
from tests.harness.runs.long_runs import ENDLESS_SETTINGS, list_rank_pids, start_long_run

LOOPBACK = "0100007F"  # 127.0.0.1 in /proc/net/tcp
LISTENING = "0A"
GROUP_BYTES = str(300 << 20)


def test_ranks_wait_for_each_other_by_name_on_nccl(tmp_path: Path) -> None:
    """A barrier would occupy the GPUs."""
    process = execute_launch_case("wait_for_ranks_by_name", tmp_path)
    assert process.returncode == 0, process.stderr


def test_ranks_join_a_process_group_and_reduce(tmp_path: Path) -> None:
    process = execute_launch_case("reduce_and_gather_ranks", tmp_path)
    assert process.returncode == 0, process.stderr


def test_the_first_traceback_is_shown_once(tmp_path: Path) -> None:
    process = execute_launch_case("rank_1_raises_an_error", tmp_path)
    assert process.returncode == 1
    assert process.stderr.count("Traceback") == 1
    assert "KeyError: 'the cause'" in process.stderr
    assert "error: rank 1 failed as shown above; the other 2 ranks were stopped" in process.stderr


def test_a_user_error_of_a_rank_has_no_traceback(tmp_path: Path) -> None:
    process = execute_launch_case("ranks_raise_user_error", tmp_path)
    assert process.returncode == 2
    assert process.stderr == "error: change this\n"


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    process = execute_launch_case("rank_2_is_killed", tmp_path)
    assert process.returncode == 128 + signal.SIGKILL
    assert "error: rank 2 (pid" in process.stderr
    assert "was killed by SIGKILL" in process.stderr
    assert "Traceback" not in process.stderr


def test_the_report_of_a_killed_rank_is_shown(tmp_path: Path) -> None:
    process = execute_launch_case("rank_0_is_killed_after_its_report", tmp_path)
    assert process.returncode == 128 + signal.SIGKILL
    assert "failed after step 3: rank 1 on node-1 did not answer; the other 2 ranks were stopped" in process.stderr


def test_the_path_of_the_temporary_folder_may_be_long(digits: Settings, tmp_path: Path) -> None:
    """The ranks of an elastic run connect to a UNIX socket in this folder."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    settings = (*digits, "steps=2", "elastic=true", "processes_per_node=2", "launch.device=cpu", "model=mlp")
    run_experiment("ddp_multinode", *settings, runs=tmp_path / "runs", real_process=True, TMPDIR=folder)
    assert not list(folder.glob("rendezvous-*"))


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 300 MB, without swap."""
    is_version_1 = (CGROUP_ROOT / "memory").is_dir()
    limit_name = "memory.limit_in_bytes" if is_version_1 else "memory.max"
    swap_limits = {"memory.memsw.limit_in_bytes": GROUP_BYTES, "memory.swap.max": "0"}
    with create_control_group("memory", {limit_name: GROUP_BYTES}, optional=swap_limits) as group:
        yield group


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_memory_is_reported(small_group: Path, tmp_path: Path) -> None:
    (tmp_path / "memory_group").write_text(str(small_group))
    process = execute_launch_case("rank_2_exceeds_memory_limit", tmp_path)
    assert process.returncode == 128 + signal.SIGKILL
    message = "was killed by SIGKILL: the system ran out of memory; the other 2 ranks were stopped"
    assert message in process.stderr


def test_a_rank_that_does_not_join_is_named(tmp_path: Path) -> None:
    process = execute_launch_case("rank_1_does_not_join", tmp_path)
    assert process.returncode == 2
    remedy = "check the logs of the missing ranks, or raise launch.setup_timeout"
    assert process.stderr == f"error: rank 1 did not join within 3 s; {remedy}\n"


def test_a_rank_that_hangs_ends_the_run_after_the_step_timeout(tmp_path: Path) -> None:
    process = execute_launch_case("rank_0_hangs", tmp_path)
    assert process.returncode == 1
    assert re.search("[Tt]imed out", process.stderr)


def test_a_new_rank_that_stops_before_it_connects_does_not_end_the_run(tmp_path: Path) -> None:
    process = execute_launch_case("new_rank_1_stops_before_it_connects", tmp_path)
    assert process.returncode == EXIT_RESUMABLE, process.stderr


def test_a_process_that_has_the_process_id_of_an_ended_rank_is_not_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    child = ChildRank(0, process.pid, tmp_path / "error-0.json", exit_code=EXIT_RESUMABLE)
    RankForker(lambda info: None, 1, 1, tmp_path, "", [child]).kill_rank(0)
    process.terminate()
    assert process.wait() == -signal.SIGTERM


def test_the_error_of_the_last_process_of_a_rank_is_deleted(tmp_path: Path) -> None:
    """Otherwise, it would be reported if the new process exits without an error message."""

    def raise_error(info: RankInfo) -> None:
        if not info.is_joining:
            raise UserError("of the first process")

    forker = RankForker(raise_error, 1, 1, tmp_path, "", [])
    forker.fork(0)
    wait_until(lambda: reap_child(forker.children[0]), "the first process exits")
    assert "of the first process" in forker.children[0].error_file.read_text()
    forker.fork_replacement(0)
    wait_until(lambda: reap_child(forker.children[0]), "the second process exits")
    assert not forker.children[0].error_file.exists()


def test_stop_signals_are_not_blocked_after_a_failed_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of an elastic run continues without the rank that it could not fork."""

    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fail)
    forker = RankForker(lambda info: None, 1, 1, tmp_path, "", [])
    with pytest.raises(BlockingIOError):
        forker.fork(0)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    assert blocked.isdisjoint(STOP_SIGNALS)


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    assert execute_launch_case("rank_0_ignores_sigterm", tmp_path).returncode == 1


def list_open_files(pids: list[int]) -> set[str]:
    """Return the targets of the file descriptors of processes."""
    targets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    targets.add(str(descriptor.readlink()))
    return targets


def list_listening_addresses(pids: list[int]) -> set[str]:
    """Return the local addresses, in hexadecimal, on which processes accept TCP connections."""
    open_files = list_open_files(pids)
    addresses = set()
    for table in ("tcp", "tcp6"):
        _, *lines = Path(f"/proc/net/{table}").read_text().splitlines()
        for line in lines:
            fields = line.split()
            is_open = f"socket:[{fields[9]}]" in open_files
            if fields[3] == LISTENING and is_open:
                addresses.add(fields[1].split(":")[0])
    return addresses


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_and_no_other_run(tmp_path: Path, digits: tuple[str, ...]) -> None:
    first_runs = tmp_path / "first"
    second_runs = tmp_path / "second"
    with (
        start_long_run("mnist_pipeline", *digits, *ENDLESS_SETTINGS, runs=first_runs) as first,
        start_long_run("mnist_pipeline", *digits, *ENDLESS_SETTINGS, runs=second_runs) as second,
    ):
        assert len(list_rank_pids(first)) == 2
        for process in (first, second):
            assert list_listening_addresses(list_rank_pids(process)) == {LOOPBACK}

        os.killpg(first.pid, signal.SIGINT)  # as Ctrl-C on a terminal does
        _, err = first.communicate(WAIT_TIMEOUT)
        assert first.returncode == 128 + signal.SIGINT
        assert "a checkpoint will be saved after the current step (if training has started)" in err
        assert "metrics up to step" in err
        assert "Traceback" not in err
        folder = get_only_run(first_runs)
        assert folder.result["exit_status"] == first.returncode
        assert folder.result["last_step"] > 0
        assert status.read_state(folder) == ("CANCELLED", "stopped by Ctrl-C")
        assert not find_processes(str(first_runs))

        assert second.poll() is None
        second.send_signal(signal.SIGTERM)
        second.communicate(WAIT_TIMEOUT)
        assert second.returncode == EXIT_RESUMABLE
        assert not find_processes(str(second_runs))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_stage_ends_the_run(tmp_path: Path, digits: tuple[str, ...], rank: int) -> None:
    with start_long_run(
        "mnist_pipeline", *digits, *ENDLESS_SETTINGS, "launch.step_timeout=600", runs=tmp_path
    ) as process:
        os.kill(list_rank_pids(process)[rank], signal.SIGKILL)
        kill_time = time.monotonic()
        _, err = process.communicate(WAIT_TIMEOUT)
        assert time.monotonic() - kill_time < 20, "5 s on an idle machine, and far less than the step timeout"
        assert process.returncode == 128 + signal.SIGKILL
        assert f"error: rank {rank} (pid" in err
        assert "killed by SIGKILL" in err
        assert "Traceback" not in err

        (attempt,) = get_only_run(tmp_path).list_attempts()
        assert attempt.metrics_file.read_text().startswith('{"global_step": 1,')
        assert attempt.result["state"] == "failed"
        assert not find_processes(str(tmp_path))
