"""Stop requests: signals after which a run saves a checkpoint and exits.

A stop signal only sets a flag. Between two steps, all ranks vote on their flags (`save_or_stop_vote.SaveOrStopVote`).

SIGUSR2 is sent when a time limit is near or when SLURM preempts the job. SIGTERM is sent when the job is requeued, or
when SLURM preempts the job at a site that does not send SIGUSR2. SIGINT is sent by Ctrl-C. A rank exits immediately
after a second SIGINT, or after any stop signal that arrives more than REPEATED_SIGNAL_SECONDS after the first one. A
rank that has not exited within the grace time is terminated.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch.distributed as dist

from common.system.exit_status import EXIT_RESUMABLE
from common.system.signals import REPEATED_SIGNAL_SECONDS, STOP_SIGNALS


class StopRequested(SystemExit):
    """Exception that ends the process with status 75, so that the next attempt resumes from the saved checkpoint.

    If `together` is True, all ranks exit after the same vote. If `together` is False, this rank exits alone, and other
    ranks may be waiting for its messages.
    """

    def __init__(self, together: bool = True) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.together = together


class StopRequest:
    """Flag that is set when this process receives a stop request.

    Signals are received by a separate thread, because the main thread may be blocked in a collective, during which no
    Python signal handler can run. `grace` is the time in seconds within which the process must exit after the first
    signal. After the grace time, the stack traces of all threads are written to `log`, and the process is terminated.
    """

    def __init__(self, grace: float, log: IO[str]) -> None:
        self.grace = grace
        self.log = log
        self.signal_number = 0
        """Signal number of the first stop request; 0 if no stop has been requested."""
        self.first_signal_time: float | None = None
        """Time of the first stop signal, as a time.monotonic() value; None if no signal has been received."""
        self._can_stop_immediately: Callable[[], bool] | None = None
        """Condition of the current `interruptible` block; None outside of such a block."""

    @classmethod
    def listen(cls, grace: float, log: IO[str]) -> StopRequest:
        """Create the flag and install the signal handlers."""
        stop = cls(grace, log)
        stop.start_listening()
        return stop

    def start_listening(self) -> None:
        """Install the signal handlers and start the thread that sets the flag.

        A signal that is already ignored stays ignored, such as SIGINT in ranks to which the launcher forwards Ctrl-C.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle_signal)
        threading.Thread(target=self._read_signals, args=(reader,), daemon=True, name="stop-request").start()

    def _handle_signal(self, number: int, frame: object) -> None:
        """Raise StopRequested in the main thread if the main thread can stop immediately; otherwise, do nothing."""
        if self._can_stop_immediately is not None and self._can_stop_immediately():
            self._can_stop_immediately = None  # the same request may be received twice
            raise StopRequested(together=False)

    def _read_signals(self, reader: int) -> None:
        """Read the signal numbers that Python writes to a pipe, and record stop requests."""
        while byte := os.read(reader, 1):
            if byte[0] in STOP_SIGNALS:
                self._record_signal(byte[0])

    def _record_signal(self, number: int) -> None:
        """Request a stop after the first signal, and exit immediately after a repeated signal."""
        now = time.monotonic()
        if self.first_signal_time is None:
            self.first_signal_time = now
            self.signal_number = self.signal_number or number
            self._start_watchdog(self.grace, exits=True)
        elif number == signal.SIGINT or now - self.first_signal_time > REPEATED_SIGNAL_SECONDS:
            os._exit(128 + number)

    @contextlib.contextmanager
    def interruptible(self, can_stop: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Within the `with` block, a stop signal raises StopRequested immediately if `can_stop()` is True.

        `can_stop` must return False while a stop without a checkpoint would lose work. Otherwise, the stop is delayed
        until the ranks vote. Blocks must not be nested.
        """
        self._can_stop_immediately = can_stop
        try:
            yield
        finally:
            self._can_stop_immediately = None

    def request_stop(self) -> None:
        """Stop this run as if SIGUSR2 had been received, unless a stop was requested before.

        The grace time does not start before the first signal, because no other program limits the time until the exit.
        The first signal after this call does not count as a repeated signal.
        """
        self.signal_number = self.signal_number or signal.SIGUSR2

    def write_stacks_to(self, path: Path) -> None:
        """Append later stack traces to a file, which stays open until the process exits."""
        self.log = open(path, "a")  # noqa: SIM115

    def wait_for_request(self) -> bool:
        """Wait up to one second for a stop request; return True if one has been received.

        A short wait is necessary, because the ranks of a run may receive the same request at slightly different times.
        """
        deadline = time.monotonic() + 1.0
        while not self.signal_number and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(self.signal_number)

    def dump_stacks_after(self, seconds: float | None) -> None:
        """Start a timer that writes the stack traces of all threads to the log after `seconds` seconds.

        Each call restarts the timer, and `seconds=None` cancels the timer. After a stop signal, the timer of the grace
        time runs instead.
        """
        if self.first_signal_time is None and seconds is None:
            faulthandler.cancel_dump_traceback_later()
        elif self.first_signal_time is None and seconds is not None:
            self._start_watchdog(seconds, exits=False)
        if self.first_signal_time is not None:  # checked last, because a signal may have arrived in the meantime
            self._start_watchdog(self.grace, exits=True)

    def _start_watchdog(self, seconds: float, *, exits: bool) -> None:
        """Start a timer that writes stack traces and, if `exits` is True, terminates the process."""
        with contextlib.suppress(RuntimeError):  # if no thread can be started, continue without a watchdog
            faulthandler.dump_traceback_later(seconds, exit=exits, file=self.log)

    def cancel_watchdog(self) -> None:
        """Cancel the timer that writes stack traces and the timer of the grace time."""
        faulthandler.cancel_dump_traceback_later()


def synchronize_before_exit() -> None:
    """Wait until all ranks are ready to exit, so that each rank reports its own exit status.

    All ranks must call this function. Without this synchronization, srun and torchrun would terminate the remaining
    ranks as soon as one rank has exited, and would then report a signal instead of the exit status.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
