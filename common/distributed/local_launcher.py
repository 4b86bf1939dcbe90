"""Launcher of the ranks of this machine: forks them, forwards stop signals, reports the first failure, kills the rest.

However a run ends, no process of it is left. Ranks are forked after the script's imports, so that two ranks cost one
`import torch`. The parent must not have used autograd, OpenMP or CUDA before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from common.core import host_memory
from common.core.errors import EXIT_REFUSED, EXIT_RESUMABLE, MachineError, UserError, explain_error
from common.core.process_limits import explain_last_words
from common.core.processes import die_with_parent, exit_at_once
from common.core.rendezvous_dir import create_rendezvous_dir
from common.core.signals import REPEAT_SECONDS, STOP_SIGNALS
from common.distributed.elastic.coordinator import Broken, Coordinator
from common.distributed.elastic.supervisor import Supervisor, open_listener
from common.distributed.rank_info import RankInfo
from common.runs.folder import disk_errors
from configs.elastic import Elastic


@dataclasses.dataclass
class ChildRank:
    """A forked rank as its parent sees it."""

    rank: int
    pid: int
    exit_code: int | None = None
    """Exit status, or minus the number of the signal that killed it; None while it runs."""


def run_ranks(
    body: Callable[[RankInfo], None],
    size: int,
    nodes: int,
    meanwhile: Callable[[], None],
    why: Callable[[str], None] = lambda words: None,
    elastic: Elastic | None = None,
    read_log: Callable[[int], str] = lambda rank: "",
    setup_timeout: float = 60.0,
) -> int:
    """Run `body` in `size` forked ranks; return the exit status of the run.

    `meanwhile` runs in this process while they start. The first rank that fails ends all others: its message or
    traceback is printed once, those of the others are only in their logs; `why` receives the reason in one line.
    With `elastic` the others go on without a rank that is killed; its new process has `setup_timeout` seconds to come.
    `read_log` returns the end of a rank's log, in which libraries say why they end a process.
    """
    private, lock = create_rendezvous_dir()
    children: list[ChildRank] = []
    stop, kills = StopForwarder(children), host_memory.count_oom_kills()
    address = str(private / "coordinator") if elastic else ""
    forker = RankForker(body, size, nodes, private, address, children)
    try:
        supervisor = None
        if elastic:
            supervisor = Supervisor(
                *(open_listener(address, size), size, elastic, forker.kill, forker.fork_again),
                start_timeout=setup_timeout,
            )
        for rank in range(size):
            forker.fork(rank)
        if stop.number:
            stop.signal_ranks()  # those that were not there yet
        meanwhile()
        return wait_for_ranks(children, private, stop, why, read_log, kills, supervisor)
    except StoppedAtOnce as stopped:
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
            print("\x1b[?25h", end="", flush=True)  # a progress bar that was ended has hidden the cursor


@dataclasses.dataclass
class RankForker:
    """Forks ranks into `children`, also anew."""

    body: Callable[[RankInfo], None]
    size: int
    nodes: int
    private: Path
    coordinator: str
    children: list[ChildRank]

    def make_rank_info(self, rank: int) -> RankInfo:
        """Return the position of a rank."""
        node, store = rank // (self.size // self.nodes), str(self.private / "store")
        return RankInfo(
            rank, self.size, rank, self.size, node, self.nodes, "local", store, coordinator=self.coordinator
        )

    def fork(self, rank: int) -> None:
        """Fork a rank that meets the others."""
        self.children.append(ChildRank(rank, fork_rank(self.body, self.make_rank_info(rank), self.private)))

    def fork_again(self, rank: int) -> None:
        """Fork a rank that was lost; it is alone until it joins the others."""
        alone = dataclasses.replace(self.make_rank_info(rank), rank=0, size=1, joins=True, launched_as=rank)
        self.children[rank] = ChildRank(rank, fork_rank(self.body, alone, self.private))

    def kill(self, rank: int) -> None:
        """Kill a rank that does not answer: a frozen one could wake later, and write."""
        os.kill(self.children[rank].pid, signal.SIGKILL)


class StoppedAtOnce(Exception):
    """A second stop signal, or one before there was anything to save: the run ends at once."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


class StopForwarder:
    """Handler of stop signals: the first is forwarded to all ranks (checkpoint and exit), a second one ends the run."""

    def __init__(self, children: list[ChildRank]) -> None:
        self.children, self.number, self.received = children, 0, 0.0
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def handle(self, number: int, frame: object) -> None:
        """Forward the first signal; raise StoppedAtOnce at the second."""
        if self.number and (number == signal.SIGINT or time.monotonic() - self.received > REPEAT_SECONDS):
            raise StoppedAtOnce(number)
        if self.number:
            return
        self.number, self.received = number, time.monotonic()
        if number == signal.SIGINT:
            told = "it saves after the next step; before the first one there is nothing to save"
            print(f"\nstopping: {told}; Ctrl-C again ends at once", file=sys.stderr)
        self.signal_ranks()

    def signal_ranks(self) -> None:
        """Send the stop request to all ranks that run."""
        for child in self.children:
            if child.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGUSR2)


def fork_rank(body: Callable[[RankInfo], None], info: RankInfo, private: Path) -> int:
    """Fork one rank; return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # a signal between the fork and the child's own handlers would run the parent's handlers in the child
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        run_child(body, info, private, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return pid


def run_child(body: Callable[[RankInfo], None], info: RankInfo, private: Path, parent: int) -> None:
    """Run `body` in a forked rank, and write why it failed for the parent; never returns."""
    status = 1
    try:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which forwards it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        body(info)
        status = 0
    except BaseException as raised:  # noqa: BLE001 (the parent reports every end)
        error = explain_error(raised)
        status = EXIT_RESUMABLE if is_resumable_exit(error) else EXIT_REFUSED if isinstance(error, UserError) else 1
        plain = isinstance(error, UserError | MachineError)
        text = str(error) if plain else traceback.format_exc()
        note = {"user": isinstance(error, UserError), "plain": plain, "text": text}
        with contextlib.suppress(OSError):
            (private / f"error-{info.number}.json").write_text(json.dumps(note))
    finally:
        exit_at_once(status)


def redirect_output(log: Path, *, keep_stdout: bool) -> None:
    """Send this process's stderr, and stdout unless kept, to a log file, the messages of C++ libraries included."""
    with disk_errors(log):
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 2)
    if not keep_stdout:
        os.dup2(handle, 1)
    os.close(handle)


def is_resumable_exit(error: BaseException) -> bool:
    """Check whether a rank ended because of a stop request, after saving."""
    return isinstance(error, SystemExit) and error.code == EXIT_RESUMABLE


def wait_for_ranks(
    children: list[ChildRank],
    private: Path,
    stop: StopForwarder,
    why: Callable[[str], None],
    read_log: Callable[[int], str],
    kills: int,
    supervisor: Supervisor | None = None,
) -> int:
    """Wait until all ranks have succeeded or one has failed, and report it; return the exit status of the run.

    `kills` is what `host_memory.count_oom_kills` returned before they started. A `supervisor` lets ranks be lost.
    """
    while any(child.exit_code is None for child in children):
        ended = [child for child in children if child.exit_code is None and reap_child(child)]
        failed = [child for child in ended if child.exit_code not in (0, EXIT_RESUMABLE)]
        if supervisor is not None:
            failed = [child for child in failed if not supervisor.accept_loss(child.rank, child.exit_code or 0)]
            supervisor.poll_and_restart_ranks([child.rank for child in children if child.exit_code is not None])
        if stop.number and any(child.exit_code == -signal.SIGUSR2 for child in failed):
            raise StoppedAtOnce(stop.number)  # it had not begun to listen, and others fail without it
        if failed:
            first, memory_is_gone = find_first_failed_rank(failed, private), host_memory.count_oom_kills() > kills
            cause = explain_last_words(read_log(first.rank), first.exit_code or 0)
            coordinator = supervisor.coordinator if supervisor is not None else None
            return report_failure(first, len(children), private, why, memory_is_gone, cause, coordinator)
        if supervisor is not None and supervisor.coordinator.broken is Broken.STATE_LOST:  # no single loss was the end
            reason = Broken.STATE_LOST.value
            why(reason)
            print(f"error: {reason}", file=sys.stderr)
            return 128 + signal.SIGKILL
        alive = [child for child in children if child.exit_code is None]
        if supervisor is not None and supervisor.newcomers.issuperset(child.rank for child in alive):
            kill_ranks(alive)  # all others have ended: nobody is left to join
            break
        if not ended and supervisor is None:
            time.sleep(0.01)
    if any(child.exit_code == EXIT_RESUMABLE for child in children):
        return 128 + stop.number if stop.number == signal.SIGINT else EXIT_RESUMABLE
    return 0


def find_first_failed_rank(failed: list[ChildRank], private: Path) -> ChildRank:
    """Return, of ranks found dead at the same time, the first to fail: a killed one, else the first that raised."""

    def read_failure_time(child: ChildRank) -> float:
        with contextlib.suppress(OSError):
            return (private / f"error-{child.rank}.json").stat().st_mtime
        return 0.0

    return min(failed, key=read_failure_time)


def reap_child(child: ChildRank) -> bool:
    """Collect the exit code of a child if it has ended; return False while it runs."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        child.exit_code = os.waitstatus_to_exitcode(status)
    return bool(pid)


def report_failure(
    child: ChildRank,
    size: int,
    private: Path,
    why: Callable[[str], None],
    short_of_memory: bool,
    cause: str,
    coordinator: Coordinator | None = None,
) -> int:
    """Print why a run failed; return its exit status.

    `cause` is what a rank's log says where it left no error, `coordinator` that of an elastic run.
    """
    assert child.exit_code is not None
    others = f"; the other {f'{size - 1} ranks were' if size > 2 else 'rank was'} stopped" if size > 1 else ""
    if child.exit_code < 0:
        name = signal.Signals(-child.exit_code).name
        if child.exit_code == -signal.SIGKILL and short_of_memory:
            name += ": the kernel ran out of memory"
        elif cause:
            name += f": {cause}"
        reason, end = f"was killed by {name}", None
        if coordinator is not None:
            reason, end = coordinator.reasons.get(child.rank, reason), coordinator.find_end()
        print(f"error: rank {child.rank} (pid {child.pid}) {reason}{others}", file=sys.stderr)
        if end is not None:
            print(end.value, file=sys.stderr)
        why(f"rank {child.rank} {reason}" + (f"; {end.value}" if end is not None else ""))
        return 128 - child.exit_code
    try:
        note = json.loads((private / f"error-{child.rank}.json").read_text())
    except (OSError, ValueError):
        note = {"user": False, "plain": False, "text": ""}
    if note["user"]:
        why(note["text"])
        print(f"error: {note['text']}", file=sys.stderr)
    elif note["plain"]:
        problem = f"rank {child.rank} failed: {note['text']}"
        why(problem)
        print(f"error: {problem}{others}", file=sys.stderr)
    elif note["text"].strip():
        why(f"rank {child.rank} failed: {note['text'].strip().splitlines()[-1]}")
        print(f"{note['text']}error: rank {child.rank} failed as shown above{others}", file=sys.stderr)
    else:
        problem = f"rank {child.rank} exited with status {child.exit_code} and left no error message"
        problem = f"rank {child.rank} failed: {cause}" if cause else problem
        why(problem)
        print(f"error: {problem}{others}", file=sys.stderr)
    return child.exit_code


def kill_ranks(children: list[ChildRank]) -> None:
    """Kill the ranks that still run."""
    alive = [child for child in children if child.exit_code is None and not reap_child(child)]
    for child in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    for child in alive:
        child.exit_code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
