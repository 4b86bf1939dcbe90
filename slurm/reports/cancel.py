"""The verb `cancel`: end a run, wherever it runs. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.core.errors import UserError
from common.runs import claims, provenance
from common.runs.folder import Folder, read_json
from common.runs.result import Result
from slurm.reports.selection import find_run
from slurm.reports.status import OVER, find_scheduler, read_state
from slurm.scheduling import submission

DOCUMENTING = 5.0  # seconds from an attempt's first rows to its entry in meta.json, at most


def cancel_run(folder: Folder) -> str:
    """End a run; returns a line on it. Raises UserError."""
    submission.wait_for_submission(folder)
    state, _ = read_state(folder)
    if state in OVER:
        return describe_over(folder, state)
    processes = find_local_processes(folder)
    meta = provenance.read_metadata(folder) if processes else wait_for_metadata(folder)
    job = meta.get("job")
    if not job and not processes:
        raise UserError(explain_nothing_found(folder, meta))
    # first: so it is not queued again, and its process knows why it has to stop
    if not Result("cancelled", 130).write_unless_there(folder):
        return describe_over(folder, read_state(folder)[0])
    lines = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["pid"], signal.SIGTERM)
        lines.append(f"cancelled process {process['pid']}; it saves and stops")
    if job:
        lines += cancel_jobs(folder, meta)
        if folder.result.get("state") == "cancelled":
            provenance.record_attempt_end(folder, "cancelled")
    return "\n".join(lines)


def cancel_jobs(folder: Folder, meta: dict[str, Any]) -> list[str]:
    """Cancel the recorded job of a run, and others that may train it; returns a line on each. Raises UserError."""
    scheduler = find_scheduler(meta)
    if scheduler is None:  # the local cluster is down, and its jobs with it
        return []
    lines = []
    for job in list_jobs(folder, meta["job"]["id"]):
        scheduler.call("scancel", job)
        lines.append(f"cancelled job {job}")
    return lines


def describe_over(folder: Folder, state: str) -> str:
    """Describe a run that is over, with its processes here that have not ended yet."""
    stopping = [claim.describe() for claim in claims.find_live_claims(folder)]
    more = f"; not ended yet: {'; '.join(stopping)}" if stopping else ""
    return f"{folder.path.name} is {state} already{more}"


def find_local_processes(folder: Folder) -> list[Mapping[str, Any]]:
    """Find the processes of this machine that train the run without SLURM: by claims, else by meta.json."""
    found = [claim.process for claim in claims.find_live_claims(folder) if not claim.job]
    meta = provenance.read_metadata(folder)
    start = (meta.get("history") or [{}])[-1]
    if not found and not meta.get("job") and claims.is_process_alive(start):
        return [start]
    return found


def list_jobs(folder: Folder, recorded: str) -> list[str]:
    """List the jobs that may train the run: the recorded one, and those of attempts that are not known to be over."""
    jobs = [recorded]
    array = recorded.partition("_")[0]
    for attempt in folder.attempts():
        claim = claims.Claim.read(attempt)
        if claim is not None and claim.job and claim.judge() is not claims.Life.ENDED and array == recorded:
            jobs.append(claim.job)
    return list(dict.fromkeys(jobs))


def explain_nothing_found(folder: Folder, meta: Mapping[str, Any]) -> str:
    """Explain why a run that is not over cannot be cancelled from here."""
    claim = claims.find_newest_claim(folder)
    start = claim.process if claim is not None else (meta.get("history") or [{}])[-1]
    if start:
        return f"{folder.path.name} runs on {start.get('host', 'another host')}; cancel it there"
    if folder.attempts():
        told = f"{folder.path / 'meta.json'} is missing or damaged, and does not tell where the run is"
        return f"{told}; end its processes where it was started, or its job with scancel"
    return f"{folder.path.name} is still being prepared; end the command that does it, or try again"


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
