"""Stop requests: signals set a flag, on which all ranks vote between two steps (`save_or_stop.SaveOrStopVote`).

A stop request is SIGUSR2 (a time limit is near, or SLURM preempts), SIGTERM (a requeue, or a site that preempts without
more) or Ctrl-C. A rank that has not ended within the grace time, or is signalled again, ends at once.
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
from common.core.signals import REPEAT_SECONDS, STOP_SIGNALS


class StopRequested(SystemExit):
    """Exit with status 75 after saving: the next attempt resumes the run.

    With `together` all ranks have voted for it. Otherwise each stops where it is, and others may wait for its messages.
    """

    def __init__(self, together: bool = True) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.together = together


class StopRequest:
    """Flag of a stop request. `log` receives the stacks of all threads if this process has to be ended.

    A thread receives the signals: the main one may be blocked in a collective, where no handler of Python runs.
    """

    def __init__(self, grace: float, log: IO[str]) -> None:
        self.grace, self.log = grace, log
        self.number = 0
        self.received = 0.0
        """Time of the first request, by time.monotonic()."""
        self.all_saved = False
        """True while nothing would be lost: the main thread then stops at the next request, wherever it is."""

    def listen(self) -> None:
        """Let signals only set the flag from now on. An ignored SIGINT stays ignored: the launcher forwards it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="stop-request").start()

    def _on_signal(self, number: int, frame: object) -> None:
        if self.all_saved:
            self.all_saved = False  # the same request may come twice
            raise StopRequested(together=False)

    def _listen(self, reader: int) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in STOP_SIGNALS:
                self._receive(byte[0])

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self.received = number, now
            self._start_watchdog(self.grace, ends=True)
        elif number == signal.SIGINT or now - self.received > REPEAT_SECONDS:
            os._exit(128 + number)

    def await_request(self) -> bool:
        """Wait up to a second for a stop request, which other ranks may receive earlier; return True if one came."""
        deadline = time.monotonic() + 1.0
        while not self.number and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(self.number)

    def dump_stacks_after(self, seconds: float | None) -> None:
        """Write the stacks of all threads to the log unless this is called within `seconds`; None cancels it."""
        if not self.number and seconds is None:
            faulthandler.cancel_dump_traceback_later()
        elif not self.number and seconds is not None:
            self._start_watchdog(seconds, ends=False)
        if self.number:  # received just now
            self._start_watchdog(self.grace, ends=True)

    def _start_watchdog(self, seconds: float, *, ends: bool) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started now, and a run is better than its watchdog
            faulthandler.dump_traceback_later(seconds, exit=ends, file=self.log)

    def cancel_watchdog(self) -> None:
        """Cancel the dump of stacks, and the exit that was to follow it after `grace`."""
        faulthandler.cancel_dump_traceback_later()


def synchronize_exit() -> None:
    """Wait for all ranks before they exit, so that each ends with its own exit status; all ranks call it.

    srun and torchrun end the others as soon as one has ended, and then report a signal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
