"""Keep the status of ended runs in a file, so that thousands of runs are listed quickly.

runs/.status.json    the status of each run that has ended, and when the files of the run last changed

The file only saves time. If it is missing or damaged, each run folder is read. If it cannot be written, the command
continues without writing it. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, TypeGuard, get_type_hints

from common.runs.description import NOTES_FILE
from common.runs.folder import RunFolder, read_json, write_atomic
from common.system.errors import UserError
from slurm.reports.status import Status, read_status

FILE_NAME = ".status.json"
FORMAT = 1  # increased if the status of the same run folder changes
TYPES: dict[str, Any] = {name: hint for name, hint in get_type_hints(Status).items() if name != "run"}
"""Types of the stored values of a status. The name of the run is the key."""
SETTLING_SECONDS = 2.0
"""A run whose files have changed more recently is not stored. A further change may get the same time stamp."""


class StatusCache:
    """The stored statuses of the runs in a folder."""

    def __init__(self, runs: Path) -> None:
        self.file = runs / FILE_NAME
        content = read_json(self.file) if self.file.is_file() else {}  # reading a FIFO would block
        entries = content.get("runs") if content.get("format") == FORMAT else {}
        self.entries: dict[str, Any] = entries if isinstance(entries, dict) else {}
        self.has_changed = False

    def read_status(self, folder: RunFolder) -> Status:
        """Return the status of a run, from the stored statuses if the run has not changed since."""
        name = folder.path.name
        entry = self.entries.get(name)
        if is_valid_entry(entry) and entry["times"] == read_change_times(folder.path, entry["status"]["attempts"]):
            return restore_status(name, entry["status"])
        status = read_status(folder)
        times = read_change_times(folder.path, status.attempts)
        # Without a result, the state depends on processes and on SLURM.
        if folder.result and status.has_ended and time.time() - max(times) / 1e9 > SETTLING_SECONDS:
            self.entries[name] = {"times": times, "status": store_status(status)}
            self.has_changed = True
        return status

    def save(self) -> None:
        """Write the statuses if they have changed. Nothing is written if the folder of runs cannot be written."""
        if self.has_changed:
            content = {"format": FORMAT, "runs": self.entries}
            with contextlib.suppress(OSError, UserError):
                write_atomic(self.file, json.dumps(content))

    def forget_other_runs(self, folders: list[RunFolder]) -> None:
        """Delete the statuses of runs that no longer exist. `folders` contains all existing runs."""
        deleted = self.entries.keys() - {folder.path.name for folder in folders}
        for name in deleted:
            del self.entries[name]
            self.has_changed = True


def is_valid_entry(entry: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether an entry of the file contains a status that can be printed."""
    if not isinstance(entry, dict) or not isinstance(entry.get("status"), dict):
        return False
    values = entry["status"]
    if values.keys() != TYPES.keys() or "times" not in entry:
        return False
    if not all(isinstance(value, TYPES[name]) for name, value in values.items()):
        return False
    return all(value.isprintable() for value in values.values() if isinstance(value, str))


def list_watched_paths(path: Path, attempts: int) -> list[str]:
    """Return the paths of which at least one changes with the status of an ended run."""
    newest = f"{path}/attempts/{attempts:04d}"
    names = ("result.json", NOTES_FILE, "attempts")
    return [str(path), *(f"{path}/{name}" for name in names), newest, f"{newest}/metrics.jsonl"]


def read_change_times(path: Path, attempts: int) -> list[int]:
    """Return when each of the watched paths last changed, in ns since 1970, or 0 if it is missing."""
    times = []
    for watched in list_watched_paths(path, attempts):
        try:
            times.append(os.stat(watched).st_mtime_ns)  # noqa: PTH116 (Path.stat takes twice as long)
        except OSError:
            times.append(0)
    return times


def store_status(status: Status) -> dict[str, Any]:
    """Return the status as JSON values. The age of the heartbeat becomes the time of the heartbeat."""
    values = {name: getattr(status, name) for name in TYPES}
    values["samples_per_second"] = float(status.samples_per_second)
    if status.heartbeat is not None:
        values["heartbeat"] = time.time() - status.heartbeat
    return values


def restore_status(name: str, values: dict[str, Any]) -> Status:
    """Return the status of a run from stored values."""
    heartbeat = values["heartbeat"]
    if heartbeat is not None:
        heartbeat = max(0.0, time.time() - heartbeat)
    return Status(**values | {"run": name, "heartbeat": heartbeat})
