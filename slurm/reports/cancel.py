"""The verb `cancel`: stop a run on any host. Imports no torch."""

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
from common.runs.folder import RunFolder, read_json
from common.runs.result import Result
from slurm.reports.selection import find_run
from slurm.reports.status import FINAL_STATES, find_scheduler, read_state
from slurm.scheduling import submission

METADATA_SECONDS = 5.0  # maximum time from an attempt's first rows to its entry in meta.json


def cancel_run(folder: RunFolder) -> str:
    """Stop a run; returns a message for the user. Raises UserError."""
    submission.wait_for_submission(folder)
    state, _ = read_state(folder)
    if state in FINAL_STATES:
        return describe_finished_run(folder, state)
    processes = find_local_processes(folder)
    meta = provenance.read_metadata(folder) if processes else wait_for_metadata(folder)
    job = meta.get("job")
    if not job and not processes:
        raise UserError(explain_missing_process(folder, meta))
    # First, so that the job is not requeued and the process knows why it must stop.
    if not Result("cancelled", 130).write_once(folder):
        return describe_finished_run(folder, read_state(folder)[0])
    lines = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["pid"], signal.SIGTERM)
        lines.append(f"cancelled process {process['pid']}; it saves a checkpoint and stops")
    if job:
        lines += cancel_jobs(folder, meta)
        if folder.result.get("state") == "cancelled":
            provenance.record_attempt_end(folder, "cancelled")
    return "\n".join(lines)


def cancel_jobs(folder: RunFolder, meta: dict[str, Any]) -> list[str]:
    """Cancel the recorded job of a run, and others that may train it; returns a line on each. Raises UserError."""
    scheduler = find_scheduler(meta)
    if scheduler is None:  # the local cluster is down, and so are its jobs
        return []
    lines = []
    for job in list_jobs(folder, meta["job"]["id"]):
        scheduler.call("scancel", job)
        lines.append(f"cancelled job {job}")
    return lines


def describe_finished_run(folder: RunFolder, state: str) -> str:
    """Describe a run that is over, with its processes on this machine that are still stopping."""
    message = f"{folder.path.name} is already {state}"
    stopping = [claim.describe() for claim in claims.find_live_claims(folder)]
    return f"{message}; still stopping: {'; '.join(stopping)}" if stopping else message


def find_local_processes(folder: RunFolder) -> list[Mapping[str, Any]]:
    """Find the processes of this machine that train the run without SLURM: by claims, else by meta.json."""
    processes = [claim.process for claim in claims.find_live_claims(folder) if not claim.job]
    meta = provenance.read_metadata(folder)
    newest = (meta.get("history") or [{}])[-1]
    if not processes and not meta.get("job") and claims.is_process_alive(newest):
        return [newest]
    return processes


def list_jobs(folder: RunFolder, recorded_job: str) -> list[str]:
    """List the jobs that may train the run: the recorded one, and those of attempts that may not have ended."""
    jobs = [recorded_job]
    if "_" in recorded_job:  # a task of an array; its claim names the same job by another id
        return jobs
    for attempt in folder.list_attempts():
        claim = claims.Claim.read(attempt)
        if claim is not None and claim.job and claim.check_process() is not claims.ProcessState.ENDED:
            jobs.append(claim.job)
    return list(dict.fromkeys(jobs))


def explain_missing_process(folder: RunFolder, meta: Mapping[str, Any]) -> str:
    """Explain why a run that is not over cannot be cancelled from this host."""
    claim = claims.find_newest_claim(folder)
    process = claim.process if claim is not None else (meta.get("history") or [{}])[-1]
    if process:
        return f"{folder.path.name} runs on {process.get('host', 'another host')}; cancel it there"
    if folder.list_attempts():
        problem = f"{folder.path / 'meta.json'} is missing or damaged, so the host of the run is unknown"
        return f"{problem}; stop its processes on the host where it was started, or its job with scancel"
    return f"{folder.path.name} is still being prepared; stop the command that prepares it, or try again"


def wait_for_metadata(folder: RunFolder) -> dict[str, Any]:
    """Wait for meta.json of an attempt whose ranks train while it is being written; returns its content."""
    file = folder.path / "meta.json"
    deadline = time.monotonic() + METADATA_SECONDS
    while folder.list_attempts() and time.monotonic() < deadline:
        if file.exists() and read_json(file).get("history") != []:
            break
        time.sleep(0.1)
    return provenance.read_metadata(folder)


def main(args: argparse.Namespace) -> int:
    """Stop a run; returns the exit status."""
    print(cancel_run(find_run(args.run, Path(args.runs_folder or "runs"))))
    return 0
