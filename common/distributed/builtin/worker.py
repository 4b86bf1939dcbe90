"""Thread that executes collectives in the order of their calls.

A collective that its caller waits for is executed by the caller itself if nothing is before it: handing it over would
cost more than a small one takes.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

FOREVER = datetime.timedelta(0)  # torch's default for `wait`


class Job(dist.Work):
    """Work that a thread executes later; `wait` raises its error.

    torch passes on only `wait` and `get_future` of works written in Python: `is_completed` is False for ever.
    """

    def __init__(self, run: Callable[[], object], value: Any) -> None:
        """`value` is that of the future: the tensors that `run` fills."""
        super().__init__()
        self.run, self.value = run, value
        self.lock, self.done = threading.Lock(), threading.Event()
        self.error: BaseException | None = None
        self.begun: torch.futures.Future[None] | None = None
        self.outcome: torch.futures.Future[Any] | None = None

    def execute(self) -> None:
        """Run; an error is kept for those who wait."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 (raised again where the value is wanted)
            self.error = error
        del self.run  # and the tensors that it holds
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """End without having been executed."""
        self.error = error
        self.done.set()
        self.call_back()

    def call_back(self) -> None:
        """Complete the future, and so call whoever wants to be called."""
        with self.lock:
            begun = self.begun
        if begun is not None:
            begun.set_result(None)

    def wait(self, timeout: datetime.timedelta = FOREVER) -> bool:
        """Wait for the end. Raises the error of the work, and TimeoutError after `timeout`, if there is one."""
        if not self.done.wait(timeout.total_seconds() or None):
            raise TimeoutError(f"the collective timed out: it did not end within {timeout.total_seconds():g} s")
        self.get_value()
        return True

    def get_value(self) -> Any:
        """Return the value of work that is done, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.value

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the value or the error."""
        with self.lock:
            if self.outcome is None:
                begun = torch.futures.Future[None]()
                # what is waited for in C++, as by DDP's reducer, learns only of errors of callbacks
                self.outcome = begun.then(lambda _: self.get_value())
                if self.done.is_set():
                    begun.set_result(None)
                else:
                    self.begun = begun
            return self.outcome


class Worker:
    """Executes jobs one at a time, in the order of their calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self.jobs: deque[Job] = deque()
        self.busy = False
        """True while a job is executed, by whatever thread."""
        self.idle = 0
        """Threads that wait for a job, or are about to."""
        self.closed: BaseException | None = None

    def run_here_if_idle(self, run: Callable[[], object]) -> bool:
        """Execute `run` in this thread and return True; do nothing and return False if another job is before it.

        The same where the worker is closed.
        """
        with self.changed:
            if self.busy or self.jobs or self.closed:
                return False
            self.busy = True
        try:
            run()
        finally:
            self._release()
        return True

    def submit(self, job: Job) -> Job:
        """Execute a job when those before it are done."""
        with self.changed:
            if self.closed is not None:
                raise self.closed
            self.jobs.append(job)
            self._find_thread()
        return job

    def close(self, error: BaseException) -> None:
        """Let all jobs fail that have not begun, and all later ones."""
        with self.changed:
            self.closed = self.closed or error
            left, self.jobs = list(self.jobs), deque()
            self.changed.notify_all()
        for job in left:
            job.fail(error)

    def _find_thread(self) -> None:
        """Wake or start a thread if a job can begin."""
        if self.busy or not self.jobs:
            return
        if self.idle:
            self.changed.notify()
        else:
            self.idle += 1
            threading.Thread(target=self._work, name=self.name, daemon=True).start()

    def _release(self) -> None:
        with self.changed:
            self.busy = False
            self._find_thread()

    def _work(self) -> None:
        """Execute jobs until the worker is closed.

        A callback may wait for a later job, as PowerSGD's do: another thread then executes that one.
        """
        while (job := self._take()) is not None:
            job.execute()
            self._release()
            job.call_back()
            del job  # its tensors
            with self.changed:
                self.idle += 1

    def _take(self) -> Job | None:
        """Wait for a job; None once the worker is closed."""
        with self.changed:
            while self.busy or not self.jobs:
                if self.closed is not None:
                    return None
                self.changed.wait()
            self.idle -= 1
            self.busy = True
            return self.jobs.popleft()
