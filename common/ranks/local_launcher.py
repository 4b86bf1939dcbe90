"""Local launcher, which forks the ranks on this machine, forwards stop signals, and reports the first failure.

When a run ends for any reason, all of its processes are terminated. Ranks are forked after the script has imported its
modules, so that torch is imported only once. The parent process must not use autograd, OpenMP, or CUDA before the fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from common.config.lookup import import_object
from common.ranks.rank_info import RankInfo
from common.ranks.rank_monitor import ChildRank, ImmediateStop, RankMonitor, StopSignalForwarder, kill_ranks
from common.ranks.rendezvous_dir import create_rendezvous_dir
from common.runs.failures import Failure
from common.runs.folder import convert_disk_errors
from common.system import foreign_text, host_memory
from common.system.causes import Cause
from common.system.errors import MachineError, UserError, convert_shortage_error
from common.system.exit_status import EXIT_REFUSED, EXIT_RESUMABLE
from common.system.processes import exit_without_cleanup, kill_with_parent
from common.system.signals import STOP_SIGNALS
from configs.dataparallel import SUPERVISOR, Elastic

SHOW_CURSOR = "\x1b[?25h"


def run_ranks(
    body: Callable[[RankInfo], None],
    size: int,
    nodes: int,
    during_start: Callable[[], None],
    report_failure: Callable[[str, Cause], None] = lambda reason, cause: None,
    elastic: Elastic | None = None,
    read_log: Callable[[int], str] = lambda rank: "",
    setup_timeout: float = 60.0,
    read_failure: Callable[[int], Failure | None] = lambda rank: None,
    grace: float = math.inf,
) -> int:
    """Run `body` in `size` forked ranks and return the exit status of the run.

    `during_start` runs in this process while the ranks start. When one rank fails, all other ranks are stopped. The
    error message or traceback of the failed rank is printed once. Errors of the other ranks appear only in their logs.
    `report_failure` is called with the reason for the failure as one line, and with the cause. `read_log` returns the
    last lines of a rank's log, which may show why a library ended the process. `read_failure` returns the failure that
    a rank has recorded before it was killed, if any. A rank terminates itself `grace` seconds after a stop request.

    If `elastic` is set, the other ranks continue when one rank is killed. The new process of the killed rank must
    connect within `setup_timeout` seconds.
    """
    private, lock = create_rendezvous_dir()
    children: list[ChildRank] = []
    stop = StopSignalForwarder(children)
    oom_kills = host_memory.count_oom_kills()
    # This address of the folder `private` is short enough for a UNIX socket. The ranks inherit the file descriptor.
    coordinator = f"/proc/self/fd/{lock}/coordinator" if elastic else ""
    forker = RankForker(body, size, nodes, private, coordinator, children)
    try:
        supervisor = None
        if elastic:
            open_supervisor = import_object(SUPERVISOR)
            supervisor = open_supervisor(
                coordinator, size, elastic, forker.kill_rank, forker.fork_replacement, setup_timeout
            )
        for rank in range(size):
            forker.fork(rank)
        if stop.number:
            stop.signal_ranks()  # the signal arrived before all ranks were forked
        during_start()
        return RankMonitor(
            children, stop, report_failure, read_log, read_failure, oom_kills, supervisor, grace
        ).wait_for_ranks()
    except ImmediateStop as stopped:
        print(f"\nstopped by {stopped}", file=sys.stderr)
        return 128 + stopped.number
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        kill_ranks(children)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        shutil.rmtree(private, ignore_errors=True)
        os.close(lock)
        if sys.stdout.isatty():
            print(SHOW_CURSOR, end="", flush=True)  # an interrupted progress bar leaves the cursor hidden


@dataclasses.dataclass
class RankForker:
    """Factory that forks the processes of ranks and adds them to `children`."""

    body: Callable[[RankInfo], None]
    size: int
    nodes: int
    private: Path
    coordinator: str
    children: list[ChildRank]

    def make_rank_info(self, rank: int) -> RankInfo:
        """Return the `RankInfo` with which a rank is started."""
        return RankInfo(
            rank=rank,
            size=self.size,
            local_rank=rank,
            local_size=self.size,
            nodes=self.nodes,
            master=str(self.private / "store"),
            coordinator=self.coordinator,
        )

    def fork(self, rank: int) -> None:
        """Fork the first process of a rank."""
        self.children.append(self._fork(self.make_rank_info(rank)))

    def fork_replacement(self, rank: int) -> None:
        """Fork a new process for a lost rank. Until it joins the other ranks, its world has size 1."""
        info = self.make_rank_info(rank)
        self.children[rank] = self._fork(
            dataclasses.replace(info, rank=0, size=1, is_joining=True, started_as_rank=rank)
        )

    def _fork(self, info: RankInfo) -> ChildRank:
        error_file = self.private / f"error-{info.original_rank}.json"
        error_file.unlink(missing_ok=True)  # written by a previous process of this rank
        return ChildRank(info.original_rank, fork_rank(self.body, info, error_file), error_file)

    def kill_rank(self, rank: int) -> None:
        """Kill an unresponsive rank, so that its process cannot resume later and write to the run folder."""
        child = self.children[rank]
        if child.is_running:  # otherwise, another process may have its process id
            os.kill(child.pid, signal.SIGKILL)


# ---- in the forked process


def fork_rank(body: Callable[[RankInfo], None], info: RankInfo, error_file: Path) -> int:
    """Fork the process of one rank and return its process id. Raises OSError if the fork fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # Until the child sets its own handlers, a signal would run the parent's handlers in the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            run_rank_in_child_process(body, info, error_file, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return pid


def run_rank_in_child_process(body: Callable[[RankInfo], None], info: RankInfo, error_file: Path, parent: int) -> None:
    """Run `body` in a forked rank and then exit the process; this function never returns.

    If `body` raises an error, the error is written to `error_file` for the parent process.
    """
    status = 1
    try:
        kill_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also receives Ctrl-C and forwards it to the ranks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        body(info)
        status = 0
    except BaseException as raised:  # noqa: BLE001 (the parent reports all exceptions)
        error = convert_shortage_error(raised)
        kind = "other"
        if isinstance(error, UserError):
            status = EXIT_REFUSED
            kind = "user"
        elif isinstance(error, SystemExit) and error.code == EXIT_RESUMABLE:
            status = EXIT_RESUMABLE
        elif isinstance(error, MachineError):
            kind = "machine"
        text = traceback.format_exc() if kind == "other" else str(error)
        note = json.dumps({"kind": kind, "text": text, "cause": foreign_text.classify_error(error)})
        with contextlib.suppress(OSError):
            error_file.write_text(note)
    finally:
        exit_without_cleanup(status)


def redirect_output(log: Path, *, keep_stdout: bool) -> None:
    """Redirect stderr to a log file, and also stdout unless `keep_stdout` is true.

    The output of C++ libraries is redirected as well.
    """
    with convert_disk_errors(log):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        handle = os.open(log, flags, 0o644)
    os.dup2(handle, 2)
    if not keep_stdout:
        os.dup2(handle, 1)
    os.close(handle)
