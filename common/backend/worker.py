"""Execute collectives in the order of their calls, in a background thread or in the calling thread.

If no other collective is pending, the calling thread executes a synchronous collective itself, because passing a small
collective to another thread would take longer than executing it.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from common.system.errors import RankTimeoutError

Task = Callable[[], object]
NO_TIMEOUT = datetime.timedelta(0)  # torch's default for `wait`


class CollectiveWork(dist.Work):
    """Handle of a collective that a background thread executes.

    For `Work` objects written in Python, torch forwards only `wait` and `get_future`, so `is_completed` always returns
    False.
    """

    def __init__(self, run: Task, tensors: Any) -> None:
        """Create the handle. `run` executes the collective and fills `tensors`, which become the future's value."""
        super().__init__()
        self.run = run
        self.tensors = tensors
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.trigger: torch.futures.Future[None] | None = None
        self.future: torch.futures.Future[Any] | None = None

    def execute(self) -> None:
        """Execute the collective. An error is stored, and `wait` raises it."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 (`wait` raises the error)
            self.error = error
        del self.run  # frees the tensors of the collective
        self.done.set()

    def complete_with_error(self, error: BaseException) -> None:
        """Complete the handle with an error, without executing the collective."""
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
        """Wait until the collective has completed.

        Raises the error of the collective, or RankTimeoutError if a non-zero `timeout` is exceeded.
        """
        if not self.done.wait(timeout.total_seconds() or None):
            raise RankTimeoutError(f"the collective timed out after {timeout.total_seconds():g} s")
        self.get_tensors()
        return True

    def get_tensors(self) -> Any:
        """Return the tensors of a completed collective, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that receives the tensors or the error of the collective."""
        with self.lock:
            if self.future is None:
                trigger = torch.futures.Future[None]()
                # C++ code that waits for the future, such as DDP's reducer, receives an error only from a callback.
                self.future = trigger.then(lambda _: self.get_tensors())
                if self.done.is_set():
                    trigger.set_result(None)
                else:
                    self.trigger = trigger
            return self.future


class CollectiveExecutor:
    """Executor that runs collectives one at a time, in the order of their calls."""

    def __init__(self, thread_name: str) -> None:
        self.thread_name = thread_name
        self.changed = threading.Condition()
        self.queue: deque[CollectiveWork] = deque()
        self.busy = False
        """True while any thread executes a collective."""
        self.idle_threads = 0
        """Number of threads that are waiting for work or are about to wait."""
        self.closing_error: BaseException | None = None

    def run_in_caller_if_idle(self, run: Task) -> bool:
        """Execute `run` in the calling thread if no other collective is pending, and return True.

        If another collective is pending or the executor is closed, do nothing and return False.
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
        """Execute a collective in a background thread after all collectives that were submitted earlier.

        If the executor is closed, raises the error that was passed to `close`.
        """
        with self.changed:
            if self.closing_error is not None:
                raise self.closing_error
            self.queue.append(work)
            self._provide_thread()
        return work

    def close(self, error: BaseException) -> None:
        """Close the executor: all collectives that have not started, and all later ones, fail with `error`."""
        with self.changed:
            self.closing_error = self.closing_error or error
            abandoned = self.queue
            self.queue = deque()
            self.changed.notify_all()
        for work in abandoned:
            work.complete_with_error(error)

    def _provide_thread(self) -> None:
        """Wake up or start a thread if a collective is ready to start."""
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

        A callback of a collective may wait for a later collective, as the callbacks of PowerSGD do. In this case,
        another thread executes the later collective.
        """
        while (work := self._wait_for_work()) is not None:
            work.execute()
            self._mark_idle()
            work.run_callbacks()
            del work  # frees the tensors of the collective
            with self.changed:
                self.idle_threads += 1

    def _wait_for_work(self) -> CollectiveWork | None:
        """Wait until the next collective can start, and return it. Return None if the executor is closed."""
        with self.changed:
            while self.busy or not self.queue:
                if self.closing_error is not None:
                    return None
                self.changed.wait()
            self.idle_threads -= 1
            self.busy = True
            return self.queue.popleft()
