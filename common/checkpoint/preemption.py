"""A notice to stop: signals set a flag, all processes agree on it between two steps, save, and leave together.

A notice is SIGUSR2 (a time limit is near, or SLURM preempts), SIGTERM (a requeue, or a site that preempts without
more) or Ctrl-C. Whoever has not left within the grace time, or is told again, ends at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import IO, NamedTuple

import torch
import torch.distributed as dist

from common.core.errors import EXIT_RESUMABLE
from common.core.signals import REPEAT_SECONDS, STOP_SIGNALS
from common.distributed.rendezvous import World
from configs.shared import Checkpoint

POLL_SECONDS = 0.5  # seconds between two looks at the flag: a message each
ANSWER_SECONDS = 5.0  # seconds for an answer of the store through which the processes met


class StopRequested(SystemExit):
    """Everything is saved and this process leaves; the run goes on with its next start.

    `together`: all processes have agreed on it. Else each leaves where it is, and the others may wait for its messages.
    """

    def __init__(self, together: bool = True) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.together = together


class StopRequest:
    """Whether this process was told to stop. `log` receives the stacks of all its threads if it has to be ended.

    A thread hears the signals: the main one may be blocked in a message, where no handler of Python runs.
    """

    def __init__(self, grace: float, log: IO[str]) -> None:
        self.grace, self.log = grace, log
        self.number = 0
        self.heard = 0.0
        self.all_saved = False
        """Whether nothing would be lost: the main thread then leaves at the next notice, wherever it is."""

    def listen(self) -> None:
        """From now on signals only set the flag. A SIGINT that is ignored stays so: a launcher hears it for us."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="notice").start()

    def _on_signal(self, number: int, frame: object) -> None:
        if self.all_saved:
            self.all_saved = False  # the same notice may come twice
            raise StopRequested(together=False)

    def _listen(self, reader: int) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in STOP_SIGNALS:
                self._hear(byte[0])

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self.heard = number, now
            faulthandler.dump_traceback_later(self.grace, exit=True, file=self.log)
        elif number == signal.SIGINT or now - self.heard > REPEAT_SECONDS:
            os._exit(128 + number)

    def comes(self, seconds: float = 1.0) -> bool:
        """Whether this process was told to stop, or is within so many seconds: others may have been a moment before."""
        deadline = time.monotonic() + seconds
        while not self.number and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(self.number)

    def watch(self, seconds: float) -> None:
        """Unless this is called again within so many seconds, write down where all threads stand."""
        if not self.number:
            faulthandler.dump_traceback_later(seconds, file=self.log)
        if self.number:  # heard just now
            faulthandler.dump_traceback_later(self.grace, exit=True, file=self.log)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def leave_together() -> None:
    """Let every rank end with its own exit status; all ranks call it.

    srun and torchrun end the others as soon as one has ended, and then report a signal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()


class Decision(NamedTuple):
    """What all processes do after a step."""

    leave: bool
    save: bool
    diverged: bool


class StopAgreement:
    """The steps after which all processes look up from training: to save when it is time, to leave when one was told.

    Seldom enough for the message that it takes not to matter: by steps that are set, and about every LOOK seconds.
    """

    def __init__(self, world: World, settings: Checkpoint, notice: StopRequest) -> None:
        self.world, self.settings, self.notice = world, settings, notice
        self.next = self.last = 0
        self.looked = self.saved = time.perf_counter()
        self.calls, self.next_call = 0, 1

    def begin(self, step: int) -> None:
        self.next = self.last = step
        self.looked = self.saved = time.perf_counter()

    def reached(self, step: int) -> bool:
        """Whether to look up now; the same in all processes."""
        return step >= self.next or self._by_steps(step)

    def _by_steps(self, step: int) -> bool:
        return bool(self.settings.every_steps) and step % self.settings.every_steps == 0

    def asked(self) -> bool:
        """Whether any process was told to stop, in work without steps. All processes call it equally often.

        It looks about every LOOK seconds, by rank 0's clock.
        """
        self.calls += 1
        if self.calls < self.next_call:
            return False
        now = time.perf_counter()
        count = min(max(1, int(self.calls * POLL_SECONDS / max(now - self.looked, 1e-6))), 4 * self.calls)
        self.calls, self.looked = 0, now
        leave, self.next_call = self._most(bool(self.notice.number), self.world.is_main * count)
        return bool(leave)

    def _most(self, *values: int) -> list[int]:
        """The largest of each value over all processes."""
        table = torch.tensor(values, dtype=torch.int64, device=self.world.device)
        if self.world.size > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX)
        return table.tolist()

    def agree(self, step: int, diverged: bool) -> Decision:
        """All processes call it at the same step. Rank 0's clock and its knowledge of the loss count."""
        now, done = time.perf_counter(), max(1, step - self.last)
        count = int(done * POLL_SECONDS / max(now - self.looked, 1e-6))
        following = step + min(max(1, count), 4 * done)
        late = 0 < self.settings.every_seconds <= now - self.saved
        main = self.world.is_main
        asked = bool(self.notice.number), main and late, main and diverged, main * following
        *answers, self.next = self._most(*asked)
        leave, by_time, stop = (bool(answer) for answer in answers)
        self.looked, self.last = now, step
        save = leave or by_time or self._by_steps(step)
        if save:
            self.saved = now
        return Decision(leave, save, stop)


class SilenceWatch:
    """Names the ranks that a message waits for where no time-out is raised in the thread that waits.

    On NCCL it stands in the driver of the GPU until NCCL's own watchdog ends the process, which names no rank.
    """

    def __init__(self, world: World, seconds: float, step: float, tell: Callable[[str], None]) -> None:
        """Call `tell` once, in a thread, after `seconds` without `restart`; a step takes about `step` seconds."""
        self.world, self.seconds, self.step, self.tell = world, seconds, step, tell
        self.closed, self.round = threading.Event(), 0
        self.restart()
        threading.Thread(target=self._wait, daemon=True, name="silence").start()

    def restart(self) -> None:
        """A step is done; all ranks call it equally often."""
        self.round += 1
        self.deadline = time.monotonic() + self.seconds

    def close(self) -> None:
        self.closed.set()

    def _wait(self) -> None:
        while not self.closed.wait(max(0.0, self.deadline - time.monotonic())):
            if time.monotonic() < self.deadline:
                continue
            words = name_silent_ranks(self.world, self.step, f"{self.round}/")
            if words and not self.closed.is_set():
                self.tell(words)
            if words:
                return
            self.deadline = time.monotonic() + self.seconds  # all wait, for what takes long


def name_silent_ranks(world: World, seconds: float, part: str = "") -> str:
    """After a message that did not come in time: the ranks that do not find the same, in words. No collective.

    Those that wait, too, have begun at most `seconds` later: about a step. `part` tells one wait of a run from others.
    """
    store, answers = world.store, list[list[int]]()
    if store is None:
        return ""

    def ask() -> None:
        with contextlib.suppress(Exception):
            store.set(f"waited/{part}{world.rank}", "")
            time.sleep(seconds)  # the others' time runs out about now
            answers.append([rank for rank in range(world.size) if not store.check([f"waited/{part}{rank}"])])

    # a store whose process stands still lets its callers wait for ever, whatever its own time limit
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds + ANSWER_SECONDS)
    if not answers:
        return f"rank 0 on {world.hosts[0]}, through which the others meet, does not answer"
    if not answers[0]:
        return ""
    who = ", ".join(f"rank {rank} on {world.hosts[rank]}" for rank in answers[0])
    return f"{who} did not answer within {world.timeout.total_seconds():g} s; its log shows where it stands"
