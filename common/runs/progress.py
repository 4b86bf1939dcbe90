"""Progress on the screen of rank 0: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

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
        self.bar: Any = None
        self.task: Any = None
        self.shown = time.monotonic()

    def print_line(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.silent:
            return
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def show_progress(self, step: int, total: int, text: str) -> None:
        """Move the bar, or print a line if the last one is long ago."""
        if self.kind == "bar":
            if self.bar is None:
                self._open(total)
            self.bar.update(self.task, completed=step, text=text)
        elif self.kind == "lines" and time.monotonic() - self.shown > LINE_EVERY:
            self.shown = time.monotonic()
            self.print_line(f"step {step}/{total}  {text}")

    def _open(self, total: int) -> None:
        # imported here: no training step waits for it
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
        self.bar = Progress("training", *columns)
        self.bar.start()
        self.task = self.bar.add_task("training", total=total, text="")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
