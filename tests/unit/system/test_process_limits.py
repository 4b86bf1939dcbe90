"""If a process cannot start a thread or another process, the error names the limit that it has reached."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.local_cluster.namespaces import fork_child, wait_for_child
from tests.harness.environment.control_groups import create_control_group
from tests.harness.repository import ROOT

NOBODY = 65534  # id of a user without rights


@pytest.fixture
def one_thread_group() -> Iterator[Path]:
    """A control group whose limit is one thread."""
    with create_control_group("pids", {"pids.max": "1"}) as group:
        yield group


def start_thread() -> None:
    threading.Thread(target=int).start()


def start_process() -> None:
    if not os.fork():
        os._exit(0)


@pytest.mark.parametrize("start", [start_thread, start_process])
def test_the_limit_of_a_control_group_is_named(
    start: Callable[[], None], one_thread_group: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def start_in_group() -> None:
        (one_thread_group / "cgroup.procs").write_text(str(os.getpid()))
        start()

    assert wait_for_child(fork_child(start_in_group)) == 1  # the child handles user errors as every command does
    err = capfd.readouterr().err
    assert err.startswith("error: no more threads or processes can be started: pids.max of control group "), err
    assert "is 1; raise that limit, or lower launch.threads" in err
    assert err.count("\n") == 1, err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_limit_of_the_user_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def start_as_limited_user() -> None:
        os.setuid(NOBODY)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        start_thread()

    assert wait_for_child(fork_child(start_as_limited_user)) == 1
    assert "can be started: ulimit -u is 1; raise that limit" in capfd.readouterr().err


def test_the_interrupt_of_numpy_without_threads_is_not_reported_as_ctrl_c(one_thread_group: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("OpenBLAS starts no threads on one core")
    training = shlex.join([sys.executable, str(ROOT / "experiments" / "mnist_pipeline.py"), "steps=1"])
    shell_script = f"echo $$ > {one_thread_group}/cgroup.procs; exec {training}"
    process = subprocess.run(["sh", "-c", shell_script], capture_output=True, text=True, check=False)
    assert process.returncode == 1, process
    assert "Ctrl-C" not in process.stderr
    assert "error: no more threads or processes can be started" in process.stderr
