"""Monitor of forked ranks, which forwards stop signals, waits for the ranks, and reports the first failure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Protocol

from common.runs.failures import Failure
from common.system import foreign_text, host_memory
from common.system.causes import Cause
from common.system.exit_status import EXIT_RESUMABLE
from common.system.process_limits import describe_thread_shortage
from common.system.signals import REPEATED_SIGNAL_SECONDS, STOP_SIGNALS

POLL_SECONDS = 0.01


@dataclasses.dataclass
class ChildRank:
    """Process of a forked rank, as recorded by its parent process."""

    rank: int
    pid: int
    error_file: Path
    """File to which the rank writes its error message if it fails."""
    exit_code: int | None = None
    """Exit status, or the negative number of the signal that killed the rank; None while the rank is running."""

    @property
    def is_running(self) -> bool:
        return self.exit_code is None


class ImmediateStop(Exception):
    """Stop signal that ends the run immediately.

    The signal is either a repeated stop signal, or a stop signal that arrived before a rank could handle it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        name = signal.Signals(number).name
        super().__init__("Ctrl-C" if name == "SIGINT" else name)


class StopSignalForwarder:
    """Handler of stop signals.

    The first signal is forwarded to all ranks, which save a checkpoint and exit. A second signal ends the run
    immediately.
    """

    def __init__(self, children: list[ChildRank]) -> None:
        self.children = children
        self.number = 0
        """Number of the first stop signal; 0 until a stop signal arrives."""
        self.received_at = 0.0
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle_stop_signal)

    def handle_stop_signal(self, number: int, frame: object) -> None:
        """Forward the first signal to all ranks, and raise ImmediateStop for the second signal."""
        if self.number:
            if number == signal.SIGINT or time.monotonic() - self.received_at > REPEATED_SIGNAL_SECONDS:
                raise ImmediateStop(number)
            return
        self.number = number
        self.received_at = time.monotonic()
        if number == signal.SIGINT:
            print(
                "\nstopping: a checkpoint will be saved after the current step (if training has started); press Ctrl-C "
                "again to stop immediately",
                file=sys.stderr,
            )
        self.signal_ranks()

    def signal_ranks(self) -> None:
        """Send the stop request to all running ranks."""
        for child in self.children:
            if child.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGUSR2)


class RankSupervisor(Protocol):
    """Supervisor of a run in which ranks may be lost and restarted."""

    @property
    def joining_ranks(self) -> set[int]:
        """Restarted ranks that have not joined the other ranks yet."""

    def handle_ended_rank(self, rank: int, exit_code: int) -> bool:
        """Handle the end of a rank's process, and return whether the run continues without this rank."""

    def poll_and_restart_ranks(self, lost_ranks: Container[int]) -> None:
        """Answer the messages of the ranks, and restart those of the lost ranks that may be restarted."""

    def find_problem_without_failed_rank(self) -> str:
        """Return why the run must end although no rank has failed; an empty string if it can continue."""

    def explain_loss(self, rank: int) -> str:
        """Return why a rank ended itself or was declared lost; an empty string if the reason is unknown."""

    def explain_end(self) -> str:
        """Return why the run ends after a rank was killed; an empty string if there is no further reason."""


@dataclasses.dataclass
class RankMonitor:
    """Monitor that waits for forked ranks and reports the first failure."""

    children: list[ChildRank]
    stop: StopSignalForwarder
    report_failure: Callable[[str, Cause], None]
    read_log: Callable[[int], str]
    read_failure: Callable[[int], Failure | None]
    oom_kills: int
    """Result of `host_memory.count_oom_kills` before the ranks started."""
    supervisor: RankSupervisor | None
    """Supervisor of an elastic run, in which ranks may be lost; None for other runs."""
    grace: float
    """Time in seconds after a stop request until a rank terminates itself."""

    def wait_for_ranks(self) -> int:
        """Wait until all ranks have succeeded or one rank has failed, and return the exit status of the run."""
        supervisor = self.supervisor
        while any(child.is_running for child in self.children):
            reaped = [child for child in self.children if child.is_running and reap_child(child)]
            failed = [child for child in reaped if child.exit_code not in (0, EXIT_RESUMABLE)]
            if supervisor is not None:
                failed = [
                    child for child in reaped if not supervisor.handle_ended_rank(child.rank, child.exit_code or 0)
                ]
                lost = [child.rank for child in self.children if child.exit_code not in (None, EXIT_RESUMABLE)]
                supervisor.poll_and_restart_ranks(lost)

            # A rank that the stop request killed had not set its handler yet. All other ranks fail without it.
            if self.stop.number and any(child.exit_code == -signal.SIGUSR2 for child in failed):
                raise ImmediateStop(self.stop.number)
            if failed:
                return self._report_failure(self._find_first_failure(failed))

            if supervisor is not None:
                problem = supervisor.find_problem_without_failed_rank()
                if problem:
                    self._report(problem, Cause.OTHER)
                    return 128 + signal.SIGKILL
                alive = [child for child in self.children if child.is_running]
                if supervisor.joining_ranks.issuperset(child.rank for child in alive):
                    kill_ranks(alive)  # all other ranks have ended, so there is no group to join
                    break
            elif not reaped:
                time.sleep(POLL_SECONDS)
        if any(child.exit_code == EXIT_RESUMABLE for child in self.children):
            return 128 + self.stop.number if self.stop.number == signal.SIGINT else EXIT_RESUMABLE
        return 0

    def _find_first_failure(self, failed: list[ChildRank]) -> ChildRank:
        """Return the rank that failed first.

        A rank that was killed has no error file, and is assumed to have failed before any rank that raised an error.
        """

        def read_failure_time(child: ChildRank) -> float:
            with contextlib.suppress(OSError):
                return child.error_file.stat().st_mtime
            return 0.0

        return min(failed, key=read_failure_time)

    def _report_failure(self, child: ChildRank) -> int:
        """Print why a run failed, and return the exit status of the run."""
        assert child.exit_code is not None
        if child.exit_code < 0:
            self._report_killed(child, -child.exit_code)
            return 128 - child.exit_code

        try:
            error = json.loads(child.error_file.read_text())
        except (OSError, ValueError):
            self._report_exit_without_error(child, child.exit_code)
            return child.exit_code
        text = error["text"]
        cause = Cause(error["cause"])
        if error["kind"] == "user":
            self._report(text, cause)
        elif error["kind"] == "machine":
            self._report(f"rank {child.rank} failed: {text}", cause, self._describe_other_ranks())
        else:
            self.report_failure(f"rank {child.rank} failed: {text.strip().splitlines()[-1]}", cause)
            problem = f"rank {child.rank} failed as shown above"
            print(f"{text}error: {problem}{self._describe_other_ranks()}", file=sys.stderr)
        return child.exit_code

    def _report_exit_without_error(self, child: ChildRank, exit_code: int) -> None:
        """Report a rank that exited with an error status but wrote no error message."""
        cause = foreign_text.classify_exit(exit_code, self.read_log(child.rank))
        problem = f"exited with status {exit_code} without an error message"
        if self.stop.number and time.monotonic() - self.stop.received_at >= self.grace:
            problem = f"did not stop within checkpoint.grace={self.grace:g} s; see its log, or raise checkpoint.grace"
        if cause is Cause.THREAD_SHORTAGE:
            problem = f"failed: {describe_thread_shortage()}"
        self._report(f"rank {child.rank} {problem}", cause, self._describe_other_ranks())

    def _report_killed(self, child: ChildRank, number: int) -> None:
        """Report a rank that was killed by a signal."""
        cause = foreign_text.classify_exit(-number, self.read_log(child.rank))
        problem = f"was killed by {signal.Signals(number).name}"
        if number == signal.SIGKILL and host_memory.count_oom_kills() > self.oom_kills:
            cause = Cause.OUT_OF_MEMORY
            problem += ": the system ran out of memory"
        elif cause is Cause.THREAD_SHORTAGE:
            problem += f": {describe_thread_shortage()}"
        elif self.supervisor is None:
            # NCCL kills a rank that waits for an unresponsive rank, after this rank has reported the other one.
            recorded = self.read_failure(child.rank)
            if recorded is not None:
                cause = recorded.cause
                problem = f"failed {recorded.message}"

        end_reason = ""
        if self.supervisor is not None:
            loss = self.supervisor.explain_loss(child.rank)
            if loss:  # the rank ended itself or was declared lost
                problem = loss
                cause = Cause.OTHER
            end_reason = self.supervisor.explain_end()
        print(f"error: rank {child.rank} (pid {child.pid}) {problem}{self._describe_other_ranks()}", file=sys.stderr)
        reason = f"rank {child.rank} {problem}"
        if end_reason:
            print(end_reason, file=sys.stderr)
            reason += f"; {end_reason}"
        self.report_failure(reason, cause)

    def _report(self, problem: str, cause: Cause, addition: str = "") -> None:
        """Report a problem as the reason for the failure, and print the problem followed by `addition`."""
        self.report_failure(problem, cause)
        print(f"error: {problem}{addition}", file=sys.stderr)

    def _describe_other_ranks(self) -> str:
        count = len(self.children) - 1
        if count > 1:
            return f"; the other {count} ranks were stopped"
        return "; the other rank was stopped" if count else ""


def reap_child(child: ChildRank) -> bool:
    """Store the exit code of a child process that has ended; return False if the process is still running."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        child.exit_code = os.waitstatus_to_exitcode(status)
    return bool(pid)


def kill_ranks(children: list[ChildRank]) -> None:
    """Kill all ranks that are still running."""
    alive = [child for child in children if child.is_running and not reap_child(child)]
    for child in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    for child in alive:
        _, status = os.waitpid(child.pid, 0)
        child.exit_code = os.waitstatus_to_exitcode(status)
