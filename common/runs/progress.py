"""Progress on the screen of rank 0: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from common.core.text import format_duration
from configs.shared import Log

LINE_EVERY = 10.0  # seconds between plain progress lines


class Screen:
    """Progress and lines on the screen; a silent one (on other ranks) shows nothing."""

    def __init__(self, cfg: Log, *, silent: bool) -> None:
        self.kind = cfg.progress
        if self.kind == "auto":
            self.kind = "bar" if sys.stdout.isatty() else "lines"
        if silent:
            self.kind = "none"
        self.silent = silent
        self.bars: Any = None
        self.tasks: dict[str, Any] = {}
        self.begun: dict[str, tuple[float, int]] = {}  # when each work was first shown, and what was done by then
        self.shown = time.monotonic()

    def print_line(self, text: str) -> None:
        """Print a line, above the bars where there are some."""
        if self.silent:
            return
        if self.bars is not None:
            self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def show_progress(self, work: str, done: int, total: int, text: str = "") -> None:
        """Move the bar of `work`, or print a line if the last one is long ago.

        `text` stands behind it; without one, how much is done in a second. `total` is 0 until it is known.
        """
        if self.kind == "none":
            return
        now = time.monotonic()
        begin, first = self.begun.setdefault(work, (now, done))
        rate = (done - first) / max(now - begin, 1e-9)
        text = text or (f"{rate:.0f}/s" if rate else "")
        if self.kind == "bar":
            if work not in self.tasks:
                self._add_bar(work)
            self.bars.update(self.tasks[work], completed=done, total=total or None, text=text)
        elif now - self.shown > LINE_EVERY:
            self.shown = now
            left = f"  {format_duration((total - done) / rate)} left" if rate else ""
            self.print_line(f"{work} {done}/{total}  {text}{left}")

    def end_progress(self, work: str) -> None:
        """Remove the bar of `work`."""
        self.begun.pop(work, None)
        if work in self.tasks:
            self.bars.remove_task(self.tasks.pop(work))

    def _add_bar(self, work: str) -> None:
        # imported here: no training step waits for it
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self.bars is None:
            # the elapsed time moves even while one batch takes long
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            text = TextColumn("{task.fields[text]}")
            # a batch of an evaluation may take longer than the 30 s from which rich tells the time that is left
            self.bars = Progress("{task.description}", *columns, text, speed_estimate_period=300)
            self.bars.start()
        self.tasks[work] = self.bars.add_task(work, total=None, text="")

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()
            self.bars = None
            self.tasks.clear()
