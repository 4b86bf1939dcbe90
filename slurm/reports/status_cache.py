"""Keep the status of ended runs in a file, so that thousands of runs are listed quickly.

runs/.status.json    the status of each run that has ended, and when the files of the run last changed

The file only saves time. If it is missing or damaged, or if the user may not write it, each run folder is read. This
module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from common.runs.description import NOTES_FILE
from common.runs.folder import RunFolder, read_json, write_atomic
from common.system.errors import UserError
from slurm.reports.status import FINAL_STATES, Status, read_status

FILE_NAME = ".status.json"
FORMAT = 1  # increased if the status of the same run folder changes
CACHED_STATES = set(FINAL_STATES) - {"LOST"}
"""States that do not change until a file of the run changes. The state LOST also depends on processes and SLURM."""
FIELDS = [field.name for field in dataclasses.fields(Status)]
WATCHED_PATHS = ("", "/result.json", f"/{NOTES_FILE}", "/attempts")
"""Paths in a run folder of which at least one changes with the status of an ended run."""
SETTLING_SECONDS = 2.0
"""A run whose files have changed more recently is not stored. A further change may get the same time stamp."""

Times = list[int]
Entry = tuple[Times, dict[str, Any]]


class StatusCache:
    """The stored statuses of the runs in a folder."""

    def __init__(self, runs: Path) -> None:
        self.file = runs / FILE_NAME
        content = read_json(self.file)
        is_readable = content.get("format") == FORMAT and content.get("fields") == FIELDS
        self.entries: dict[str, Entry] = content["runs"] if is_readable else {}
        self.has_changed = False

    def read_status(self, folder: RunFolder) -> Status:
        """Return the status of a run, from the stored statuses if the run has not changed since."""
        name = folder.path.name
        times = read_change_times(folder.path)
        stored = self.entries.get(name)
        if stored is not None and stored[0] == times:
            values = stored[1]
            if all(value.isprintable() for value in values.values() if isinstance(value, str)):
                return restore_status(name, values)
        status = read_status(folder)
        if status.state in CACHED_STATES and time.time() - max(times) / 1e9 > SETTLING_SECONDS:
            self.entries[name] = (times, store_status(status))
            self.has_changed = True
        return status

    def save(self) -> None:
        """Write the statuses if they have changed. Nothing is written if the folder of runs cannot be written."""
        if self.has_changed:
            content = {"format": FORMAT, "fields": FIELDS, "runs": self.entries}
            with contextlib.suppress(OSError, UserError):
                write_atomic(self.file, json.dumps(content))

    def forget_other_runs(self, folders: list[RunFolder]) -> None:
        """Delete the statuses of runs that no longer exist. `folders` contains all existing runs."""
        deleted = self.entries.keys() - {folder.path.name for folder in folders}
        for name in deleted:
            del self.entries[name]
            self.has_changed = True


def read_change_times(path: Path) -> Times:
    """Return when each of the watched paths in a run folder last changed, in ns since 1970, or 0 if it is missing."""
    times = []
    for suffix in WATCHED_PATHS:
        try:
            times.append(os.stat(f"{path}{suffix}").st_mtime_ns)  # noqa: PTH116 (Path.stat takes twice as long)
        except OSError:
            times.append(0)
    return times


def store_status(status: Status) -> dict[str, Any]:
    """Return the status as JSON values. The age of the heartbeat becomes the time of the heartbeat."""
    values = {name: getattr(status, name) for name in FIELDS}
    del values["run"]
    if status.heartbeat is not None:
        values["heartbeat"] = time.time() - status.heartbeat
    return values


def restore_status(name: str, values: dict[str, Any]) -> Status:
    """Return the status of a run from stored values."""
    heartbeat = values["heartbeat"]
    if heartbeat is not None:
        heartbeat = max(0.0, time.time() - heartbeat)
    return Status(**values | {"run": name, "heartbeat": heartbeat})
