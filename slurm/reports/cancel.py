"""The verb `cancel`: end a run, wherever it runs. Imports no torch."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

from common.core.errors import UserError
from common.runs import provenance
from common.runs.folder import Folder, read_json
from common.runs.result import Result
from slurm.reports.selection import find_run
from slurm.reports.status import OVER, find_scheduler, is_process_alive, read_state

DOCUMENTING = 5.0  # seconds from an attempt's first rows to its entry in meta.json, at most


def cancel_run(folder: Folder) -> str:
    """End a run; returns a line on it. Raises UserError."""
    state, _ = read_state(folder)
    if state in OVER:
        return f"{folder.path.name} is {state} already"
    meta = wait_for_metadata(folder)
    job, start = meta.get("job"), (meta.get("history") or [{}])[-1]
    if not job and not start and folder.attempts():
        told = f"{folder.path / 'meta.json'} is missing or damaged, and does not tell where the run is"
        raise UserError(f"{told}; end its processes where it was started, or its job with scancel")
    if not job and not start:
        raise UserError(f"{folder.path.name} is still being prepared; end the command that does it, or try again")
    if not job and is_process_alive(start) is None:
        raise UserError(f"{folder.path.name} runs on {start.get('host', 'another host')}; cancel it there")
    # first: so it is not queued again, and its process knows why it has to stop
    Result("cancelled", 130).write(folder)
    if not job:
        os.kill(start["pid"], signal.SIGTERM)
        return f"cancelled process {start['pid']}; it saves and stops"
    scheduler = find_scheduler(meta)
    assert scheduler is not None, "it would be LOST"
    scheduler.call("scancel", job["id"])
    provenance.record_attempt_end(folder, "cancelled")
    return f"cancelled job {job['id']}"


def wait_for_metadata(folder: Folder) -> dict[str, Any]:
    """Wait for meta.json of an attempt whose ranks train already while it is being written; return its content."""
    file, deadline = folder.path / "meta.json", time.monotonic() + DOCUMENTING
    while folder.attempts() and (not file.exists() or read_json(file).get("history") == []):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return provenance.read_metadata(folder)


def main(given: argparse.Namespace) -> int:
    """End a run; returns the exit status."""
    print(cancel_run(find_run(given.run, Path(given.runs_folder or "runs"))))
    return 0
