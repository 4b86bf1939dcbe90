"""Stop requests: signals set a flag, on which all ranks vote between two steps (`save_or_stop.SaveOrStopVote`).

A stop request is SIGUSR2 (a time limit is near, or SLURM preempts), SIGTERM (a requeue, or a site that preempts without
SIGUSR2) or Ctrl-C. A rank that has not exited within the grace time, or is signalled again, exits immediately.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from typing import IO

import torch.distributed as dist

from common.core.errors import EXIT_RESUMABLE
from common.core.signals import REPEATED_SIGNAL_SECONDS, STOP_SIGNALS


class StopRequested(SystemExit):
    """Resumable exit (status 75) after saving: the next attempt resumes the run.

    With `together` all ranks exit after the same vote. Otherwise this rank exits alone, and others may wait for its
    messages.
    """

    def __init__(self, together: bool = True) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.together = together


class StopRequest:
    """Flag of a stop request. `log` receives the stacks of all threads if the grace time runs out.

    A thread receives the signals: the main thread may be blocked in a collective, where no Python handler runs.
    """

    def __init__(self, grace: float, log: IO[str]) -> None:
        self.grace = grace
        self.log = log
        self.signal_number = 0
        """Signal of the first request; 0 if there is none."""
        self.received = 0.0
        """Time of the first request, by time.monotonic()."""
        self.can_stop_immediately = False
        """True while no unsaved state exists: the main thread then stops immediately at the next request."""

    def start_listening(self) -> None:
        """Handle signals by setting the flag. An ignored SIGINT stays ignored: the launcher forwards it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="stop-request").start()

    def _on_signal(self, number: int, frame: object) -> None:
        if self.can_stop_immediately:
            self.can_stop_immediately = False  # the same request may arrive twice
            raise StopRequested(together=False)

    def _listen(self, reader: int) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in STOP_SIGNALS:
                self._receive(byte[0])

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if not self.signal_number:
            self.signal_number = number
            self.received = now
            self._start_watchdog(self.grace, exits=True)
        elif number == signal.SIGINT or now - self.received > REPEATED_SIGNAL_SECONDS:
            os._exit(128 + number)

    def await_request(self) -> bool:
        """Wait up to a second for a stop request, which other ranks may receive first; return True if there is one."""
        deadline = time.monotonic() + 1.0
        while not self.signal_number and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(self.signal_number)

    def dump_stacks_after(self, seconds: float | None) -> None:
        """Write the stacks of all threads to the log unless this is called again within `seconds`; None cancels it.

        After a stop request the watchdog of the grace time runs instead.
        """
        if not self.signal_number and seconds is None:
            faulthandler.cancel_dump_traceback_later()
        elif not self.signal_number and seconds is not None:
            self._start_watchdog(seconds, exits=False)
        if self.signal_number:  # also if the signal has arrived in the meantime
            self._start_watchdog(self.grace, exits=True)

    def _start_watchdog(self, seconds: float, *, exits: bool) -> None:
        with contextlib.suppress(RuntimeError):  # if no thread can be started, continue without a watchdog
            faulthandler.dump_traceback_later(seconds, exit=exits, file=self.log)

    def cancel_watchdog(self) -> None:
        """Cancel the dump of stacks and the exit after the grace time."""
        faulthandler.cancel_dump_traceback_later()


def synchronize_exit() -> None:
    """Wait for all ranks before they exit, so that each rank reports its exit status. All ranks call it.

    srun and torchrun terminate the other ranks as soon as one has exited, and then report a signal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
