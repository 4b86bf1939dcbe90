"""A process that may start no more threads or processes says which limit it has reached."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.system.causes import Cause
from common.system.errors import convert_shortage_error
from common.system.foreign_text import classify_exit
from slurm.local_cluster.namespaces import fork_child, wait_for_child
from tests.harness.warm import ROOT

NOBODY = 65534


@pytest.fixture
def narrow_group() -> Iterator[Path]:
    """A control group for one thread."""
    first = Path("/sys/fs/cgroup/pids")
    group = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("1")
    except OSError as error:
        pytest.skip(f"needs a control group of its own: {error}")
    yield group
    end = time.monotonic() + 10
    while group.exists() and time.monotonic() < end:
        with contextlib.suppress(OSError):
            group.rmdir()


def start_thread() -> None:
    threading.Thread(target=int).start()


def fork() -> None:
    if not os.fork():
        os._exit(0)


@pytest.mark.parametrize("start", [start_thread, fork])
def test_a_full_control_group_is_named(
    start: Callable[[], None], narrow_group: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        (narrow_group / "cgroup.procs").write_text(str(os.getpid()))
        start()

    assert wait_for_child(fork_child(run)) == 1  # `fork_child` ends by `exit_on_user_error`, as every command does
    said = capfd.readouterr().err
    assert said.startswith("error: no more threads or processes can be started: pids.max of control group "), said
    assert "is 1; raise that limit, or lower launch.threads" in said and said.count("\n") == 1, said


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_limit_of_the_user_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        os.setuid(NOBODY)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        start_thread()

    assert wait_for_child(fork_child(run)) == 1
    assert "can be started: ulimit -u is 1; raise that limit" in capfd.readouterr().err


def test_numpy_that_can_start_no_threads_is_no_ctrl_c(narrow_group: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("OpenBLAS starts no threads on one core")
    program = [sys.executable, str(ROOT / "experiments" / "mnist_pipeline.py"), "steps=1"]
    words = f"echo $$ > {narrow_group}/cgroup.procs; exec {' '.join(program)}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Ctrl-C" not in done.stderr, done
    assert "error: no more threads or processes can be started" in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "metrics.jsonl"),
        RuntimeError("[enforce fail at gloo/transport/tcp/socket.cc:24] socket: Too many open files"),
    ],
)
def test_a_shortage_of_files_names_the_limit_and_the_remedy(error: Exception) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"ulimit -n is {limit}; raise that limit, or lower data.workers" in str(convert_shortage_error(error))


def test_other_errors_stay_as_they_are() -> None:
    for error in (RuntimeError("a bug"), FileNotFoundError(2, "No such file"), ValueError("temporarily")):
        assert convert_shortage_error(error) is error


def test_a_socket_or_lock_that_would_wait_is_no_shortage() -> None:
    end, other_end = socket.socketpair()
    with end, other_end:
        end.setblocking(False)
        with pytest.raises(BlockingIOError) as error:
            end.recv(1)
    for other in (error.value, BlockingIOError(11, "Resource temporarily unavailable"), OSError(11, "mlock")):
        assert convert_shortage_error(other) is other
    store = RuntimeError("TCPStore: recv failed: Resource temporarily unavailable")
    assert convert_shortage_error(store) is store


@pytest.mark.parametrize(
    ("log", "exit_code", "is_shortage"),
    [
        ("terminate called without an active exception\n", -signal.SIGABRT, True),
        ("terminate called without an active exception\n", -signal.SIGSEGV, False),
        ("what():  Resource temporarily unavailable", -signal.SIGABRT, False),
        ("of 'std::system_error'\n  what():  Resource temporarily unavailable", -signal.SIGABRT, True),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", 1, True),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", -signal.SIGSEGV, False),
        ("NCCL WARN socket: Resource temporarily unavailable", 1, False),
        ("Fatal Python error: Aborted", -signal.SIGABRT, False),
    ],
)
def test_only_the_last_words_of_an_aborted_process_count(log: str, exit_code: int, is_shortage: bool) -> None:
    assert (classify_exit(exit_code, log) is Cause.THREAD_SHORTAGE) == is_shortage
