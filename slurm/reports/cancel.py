"""The `cancel` command: stop a run, on this machine or through SLURM. This module does not import torch."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.runs import claims, provenance
from common.runs.folder import RunFolder, read_json
from common.runs.result import Result
from common.system.causes import Cause
from common.system.errors import UserError
from slurm.reports.selection import find_run
from slurm.reports.status import FINAL_STATES, find_scheduler, read_state
from slurm.scheduling import submission

METADATA_SECONDS = 5.0  # maximum delay from the start of an attempt to its entry in meta.json


def cancel_run(folder: RunFolder) -> str:
    """Stop a run and return a message for the user.

    Raises UserError if no job and no process on this machine trains the run, or if the job cannot be canceled.
    """
    submission.wait_for_submission(folder)
    state, _ = read_state(folder)
    if state in FINAL_STATES:
        return describe_ended_run(folder, state)

    processes = find_local_processes(folder)
    meta = provenance.read_metadata(folder) if processes else wait_for_metadata(folder)
    job = meta.get("job")
    if not job and not processes:
        raise UserError(explain_missing_process(folder, meta))

    # Write the result first. The result prevents a requeue and gives the process the reason for stopping.
    if not Result("cancelled", 130).write_once(folder):
        return describe_ended_run(folder, read_state(folder)[0])
    written = folder.result

    lines: list[str] = []
    for process in processes:
        try:
            os.kill(process["pid"], signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError:
            if not lines:
                withdraw_result(folder, written)
            raise UserError(f"process {process['pid']} belongs to another user; that user can cancel the run") from None
        lines.append(f"canceled process {process['pid']}; the process will save a checkpoint and stop")
    if job:
        try:
            for line in cancel_jobs(folder, meta):
                lines.append(line)
        except UserError:
            if not lines:
                withdraw_result(folder, written)
            raise
        if folder.result.get("state") == "cancelled":
            provenance.record_attempt_end(folder, "cancelled")
    return "\n".join(lines)


def withdraw_result(folder: RunFolder, written: Mapping[str, Any]) -> None:
    """Delete the result of a run that continues, so that `make cancel` can be repeated.

    `written` is the result that `make cancel` wrote. Another result is kept.
    """
    if folder.result == written:
        (folder.path / "result.json").unlink()


def cancel_jobs(folder: RunFolder, meta: dict[str, Any]) -> Iterator[str]:
    """Cancel all jobs that may train a run, and yield a message about each job.

    Raises UserError if scancel fails, or if the jobs belong to another SLURM cluster.
    """
    scheduler = find_scheduler(meta)
    if scheduler is None:  # the local cluster is down, so its jobs have ended
        return
    scheduler.check_cluster(meta["job"]["id"])
    for job in list_jobs_of_run(folder, meta["job"]["id"]):
        try:
            scheduler.run_command("scancel", job)
        except UserError as error:
            if error.cause is not Cause.UNKNOWN_JOB:  # SLURM forgets a job some time after its end
                raise
        else:
            yield f"canceled job {job}"


def describe_ended_run(folder: RunFolder, state: str) -> str:
    """Describe the state of an ended run and its processes that are still stopping."""
    message = f"{folder.path.name} is already {state}"
    stopping = [claim.describe() for claim in claims.find_live_claims(folder)]
    return f"{message}; still stopping: {'; '.join(stopping)}" if stopping else message


def find_local_processes(folder: RunFolder) -> list[Mapping[str, Any]]:
    """Return the processes on this machine that train a run without SLURM.

    The processes are read from claims. If no claim is alive, the process in meta.json is used.
    """
    processes = [claim.process for claim in claims.find_live_claims(folder) if not claim.job]
    meta = provenance.read_metadata(folder)
    newest = (meta.get("history") or [{}])[-1]
    if not processes and not meta.get("job") and claims.is_process_alive(newest):
        return [newest]
    return processes


def list_jobs_of_run(folder: RunFolder, recorded_job: str) -> list[str]:
    """Return the ids of the jobs that may train a run.

    The list contains the job in meta.json, and the jobs that claimed an attempt and may still be running.
    """
    jobs = [recorded_job]
    if "_" in recorded_job:  # a task of a job array; an old claim may contain the id of the whole array
        return jobs
    for attempt in folder.list_attempts():
        claim = claims.Claim.read(attempt)
        if claim is not None and claim.job and claim.check_process() is not claims.ProcessState.ENDED:
            jobs.append(claim.job)
    return list(dict.fromkeys(jobs))


def explain_missing_process(folder: RunFolder, meta: Mapping[str, Any]) -> str:
    """Return why an active run cannot be canceled from this host, and a remedy."""
    claim = claims.find_newest_claim(folder)
    process = claim.process if claim is not None else (meta.get("history") or [{}])[-1]
    if process:
        return f"{folder.path.name} is running on {process.get('host', 'another host')}; run make cancel there"
    if folder.list_attempts():
        problem = f"{folder.path / 'meta.json'} is missing or damaged, so the host of the run is unknown"
        return f"{problem}; stop the run's processes on the host that runs them, or cancel the run's job with scancel"
    return f"{folder.path.name} is still being prepared; stop the command that prepares it, or try again later"


def wait_for_metadata(folder: RunFolder) -> dict[str, Any]:
    """Wait until meta.json records the attempt of a run, and return its content.

    The ranks of a run start before meta.json records the attempt. The wait takes at most METADATA_SECONDS.
    """
    file = folder.path / "meta.json"
    deadline = time.monotonic() + METADATA_SECONDS
    while folder.list_attempts() and time.monotonic() < deadline:
        if file.exists() and read_json(file).get("history") != []:  # the history lists the recorded attempts
            break
        time.sleep(0.1)
    return provenance.read_metadata(folder)


def main(args: argparse.Namespace) -> int:
    """Stop a run, print a message, and return the exit status."""
    print(cancel_run(find_run(args.run, Path(args.runs_folder or "runs"))))
    return 0
