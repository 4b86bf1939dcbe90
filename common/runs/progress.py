"""Progress display of rank 0: bars if the output is a terminal, and plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any

from common.system.text import format_duration
from configs.shared import Log

LINE_SECONDS = 10.0  # minimum time, in seconds, between plain progress lines
SPEED_SECONDS = 300  # window of rich's speed estimate; one evaluation batch may exceed the default of 30 s


class ProgressDisplay:
    """Progress bars and lines of one rank. On ranks other than 0, the display is silent and prints nothing."""

    def __init__(self, cfg: Log, *, silent: bool) -> None:
        self.kind = cfg.progress
        if self.kind == "auto":
            self.kind = "bar" if sys.stdout.isatty() else "lines"
        if silent:
            self.kind = "none"
        self.silent = silent
        self.bars: Any = None
        self.tasks: dict[str, Any] = {}
        self.starts: dict[str, tuple[float, int]] = {}  # time and count at the first update, by `work`
        self.last_line_time = time.monotonic()

    def print_line(self, text: str) -> None:
        """Print a line. If progress bars are shown, the line appears above the bars."""
        if self.silent:
            return
        if self.bars is not None:
            self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def show_progress(self, work: str, done: int, total: int, text: str = "") -> None:
        """Update the progress bar named `work`, or print a line if LINE_SECONDS have passed since the last line.

        `text` is shown after the progress and defaults to the rate per second. `total` is 0 while the total is unknown.
        """
        if self.kind == "none":
            return
        now = time.monotonic()
        start_time, start_count = self.starts.setdefault(work, (now, done))
        rate = (done - start_count) / max(now - start_time, 1e-9)
        if not text and rate:
            text = f"{rate:.0f}/s"
        if self.kind == "bar":
            if work not in self.tasks:
                self._add_bar(work)
            self.bars.update(self.tasks[work], completed=done, total=total or None, text=text)
        elif now - self.last_line_time > LINE_SECONDS:
            self.last_line_time = now
            remaining = f"  {format_duration((total - done) / rate)} left" if rate else ""
            self.print_line(f"{work} {done}/{total}  {text}{remaining}")

    def end_progress(self, work: str) -> None:
        """Remove the progress bar named `work`."""
        self.starts.pop(work, None)
        if work in self.tasks:
            self.bars.remove_task(self.tasks.pop(work))

    def _add_bar(self, work: str) -> None:
        # imported here so that importing rich does not delay training steps
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self.bars is None:
            # the elapsed time advances even during a long batch
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            text = TextColumn("{task.fields[text]}")
            self.bars = Progress("{task.description}", *columns, text, speed_estimate_period=SPEED_SECONDS)
            self.bars.start()
        self.tasks[work] = self.bars.add_task(work, total=None, text="")

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()
            self.bars = None
            self.tasks.clear()
