"""Write metrics.jsonl on rank 0. Each row is one complete line, even if the disk is temporarily full."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from common.runs.folder import convert_disk_errors
from common.system.errors import UserError

ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps would create an encoder for each row


def replace_nonfinite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in which null replaces NaN and infinity, which JSON cannot represent."""
    finite_row = dict(row)
    for name, number in row.items():
        if isinstance(number, float) and not math.isfinite(number):
            finite_row[name] = None
    return finite_row


class MetricsWriter:
    """Writer that keeps rows in memory while it cannot write them to the disk."""

    def __init__(self, file: Path, warn: Callable[[str], None]) -> None:
        self.file = file
        self.warn = warn
        self.written = 0
        self.buffered_lines: list[str] = []
        self.has_warned = False

    def continue_file(self) -> list[dict[str, Any]]:
        """Continue a file of another process, and return its rows.

        An incomplete last line is removed. Buffered lines are discarded, because the other process may have written
        them.
        """
        content = self.file.read_bytes() if self.file.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            os.truncate(self.file, len(complete))
        rows = [json.loads(line) for line in complete.splitlines()]
        self.written = len(rows)
        self.buffered_lines = []
        return rows

    def add_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows. If writing fails, warn once and keep the rows for the next call."""
        self.buffered_lines += [ENCODER.encode(replace_nonfinite(row)) + "\n" for row in rows]
        try:
            self.write_buffered_rows()
        except (UserError, OSError) as error:  # an OSError if, for example, a network disk does not respond for a while
            if not self.has_warned:
                problem = error if isinstance(error, UserError) else f"cannot write {self.file}: {error.strerror}"
                self.warn(f"WARNING: {problem}; training continues, and metrics are buffered in memory")
            self.has_warned = True

    def write_buffered_rows(self) -> None:
        """Write the buffered rows. If writing fails, remove partially written lines and raise UserError or OSError."""
        if not self.buffered_lines:
            return
        with convert_disk_errors(self.file):
            size = self.file.stat().st_size if self.file.exists() else 0
            try:
                with open(self.file, "a") as file:
                    file.write("".join(self.buffered_lines))
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self.file, size)
                raise
        self.written += len(self.buffered_lines)
        self.buffered_lines = []
        self.has_warned = False
