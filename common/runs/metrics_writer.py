"""Writer of metrics.jsonl on rank 0: complete lines, each once, also on a disk that is full for a while."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from common.core.errors import UserError
from common.runs.folder import disk_errors

ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps would make one for each row


def replace_nonfinite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with null for the values that JSON cannot hold: NaN and infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


class MetricsWriter:
    """Writer that keeps rows in memory while the disk refuses them."""

    def __init__(self, file: Path, warn: Callable[[str], None]) -> None:
        self.file, self.warn = file, warn
        self.written = 0
        self.waiting: list[str] = []
        self.warned = False

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows; where the disk refuses, warn once and keep them for the next call."""
        self.waiting += [ENCODER.encode(replace_nonfinite(row)) + "\n" for row in rows]
        try:
            self.flush()
        except UserError as error:
            if not self.warned:
                self.warn(f"WARNING: {error}; training goes on, and the metrics wait in memory")
            self.warned = True

    def flush(self) -> None:
        """Write the rows that wait. Raises UserError; then no partial line is left."""
        if not self.waiting:
            return
        with disk_errors(self.file):
            size = self.file.stat().st_size if self.file.exists() else 0
            try:
                with open(self.file, "a") as file:
                    file.write("".join(self.waiting))
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self.file, size)
                raise
        self.written += len(self.waiting)
        self.waiting, self.warned = [], False
