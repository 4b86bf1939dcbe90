"""Execution of collectives in call order, in a thread or in the caller.

The caller executes a synchronous collective itself if no other one is pending: passing it to another thread would take
longer than a small collective.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Task = Callable[[], object]
NO_TIMEOUT = datetime.timedelta(0)  # torch's default for `wait`


class CollectiveWork(dist.Work):
    """Handle of a collective that a thread executes later; `wait` raises its error.

    torch forwards only `wait` and `get_future` to works written in Python: `is_completed` always returns False.
    """

    def __init__(self, run: Task, tensors: Any) -> None:
        """`tensors`, which `run` fills, are the value of the future."""
        super().__init__()
        self.run = run
        self.tensors = tensors
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.trigger: torch.futures.Future[None] | None = None
        self.future: torch.futures.Future[Any] | None = None

    def execute(self) -> None:
        """Run the collective; an error is stored and raised by `wait`."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 (`wait` raises it)
            self.error = error
        del self.run  # frees its tensors
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """Complete with an error, without having been executed."""
        self.error = error
        self.done.set()
        self.run_callbacks()

    def run_callbacks(self) -> None:
        """Complete the future and run its callbacks."""
        with self.lock:
            trigger = self.trigger
        if trigger is not None:
            trigger.set_result(None)

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Wait for completion. Raises the error of the collective, or TimeoutError after a non-zero `timeout`."""
        if not self.done.wait(timeout.total_seconds() or None):
            raise TimeoutError(f"the collective timed out: not finished after {timeout.total_seconds():g} s")
        self.get_tensors()
        return True

    def get_tensors(self) -> Any:
        """Return the tensors of a completed collective, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the tensors or the error."""
        with self.lock:
            if self.future is None:
                trigger = torch.futures.Future[None]()
                # C++ code that waits for the future, such as DDP's reducer, gets only errors of callbacks
                self.future = trigger.then(lambda _: self.get_tensors())
                if self.done.is_set():
                    trigger.set_result(None)
                else:
                    self.trigger = trigger
            return self.future


class CollectiveExecutor:
    """Executes collectives one at a time, in the order of their calls."""

    def __init__(self, thread_name: str) -> None:
        self.thread_name = thread_name
        self.changed = threading.Condition()
        self.queue: deque[CollectiveWork] = deque()
        self.busy = False
        """True while any thread executes a collective."""
        self.idle_threads = 0
        """Threads that wait for work, or are about to."""
        self.closing_error: BaseException | None = None

    def run_in_caller_if_idle(self, run: Task) -> bool:
        """Execute `run` in the calling thread and return True.

        Do nothing and return False if another collective is before it or the executor is closed.
        """
        with self.changed:
            if self.busy or self.queue or self.closing_error:
                return False
            self.busy = True
        try:
            run()
        finally:
            self._mark_idle()
        return True

    def submit(self, work: CollectiveWork) -> CollectiveWork:
        """Execute a collective after those before it. Raises the error of `close`."""
        with self.changed:
            if self.closing_error is not None:
                raise self.closing_error
            self.queue.append(work)
            self._provide_thread()
        return work

    def close(self, error: BaseException) -> None:
        """Fail all collectives that have not started, and all later ones, with an error."""
        with self.changed:
            self.closing_error = self.closing_error or error
            abandoned = self.queue
            self.queue = deque()
            self.changed.notify_all()
        for work in abandoned:
            work.fail(error)

    def _provide_thread(self) -> None:
        """Wake or start a thread if a collective can start."""
        if self.busy or not self.queue:
            return
        if self.idle_threads:
            self.changed.notify()
        else:
            self.idle_threads += 1
            threading.Thread(target=self._execute_queue, name=self.thread_name, daemon=True).start()

    def _mark_idle(self) -> None:
        with self.changed:
            self.busy = False
            self._provide_thread()

    def _execute_queue(self) -> None:
        """Execute collectives until the executor is closed.

        A callback may wait for a later collective, as PowerSGD's do: another thread then executes that one.
        """
        while (work := self._wait_for_work()) is not None:
            work.execute()
            self._mark_idle()
            work.run_callbacks()
            del work  # frees its tensors
            with self.changed:
                self.idle_threads += 1

    def _wait_for_work(self) -> CollectiveWork | None:
        """Return the next collective, waiting until it can start; None once the executor is closed."""
        with self.changed:
            while self.busy or not self.queue:
                if self.closing_error is not None:
                    return None
                self.changed.wait()
            self.idle_threads -= 1
            self.busy = True
            return self.queue.popleft()
