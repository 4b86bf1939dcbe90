"""Exclusive submission of a run, and the check that the run belongs to a job.

A command that submits a run holds the lock of the run. The command also creates the submission file in `submit/`. Only
one command can create the file, even if commands on several hosts submit the run. The command then reads the state of
the run. The command keeps the lock and the file until it has written the job id to meta.json. A job that starts or is
requeued checks whether the run still belongs to the job. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from common.runs import claims, provenance
from common.runs.folder import RunFolder, convert_disk_errors, read_json
from common.runs.run_lock import try_to_lock
from common.system.errors import RunTakenError

STALE_SECONDS = 120.0
"""Age, in seconds, at which a submission by a process that this machine cannot check is considered abandoned."""
RECORDING_SECONDS = 60.0
"""Maximum time, in seconds, for which a started job waits for the submitting command to record the job id."""
UNANNOUNCED_SECONDS = 5.0
"""Maximum time, in seconds, for which a started job waits for its id if there is no submission file.

Older versions of the project do not write a submission file.
"""
POLL_SECONDS = 0.1


def locate_submission_file(folder: RunFolder) -> Path:
    """Return the path of the file that exists while a run is being submitted."""
    return folder.path / "submit" / "submitting.json"


def is_being_submitted(folder: RunFolder) -> bool:
    """Return whether another process is submitting the run."""
    path = locate_submission_file(folder)
    submitter = read_json(path)
    if submitter == provenance.identify_process():
        return False
    is_alive = claims.is_process_alive(submitter) if submitter else None
    if is_alive is not None:
        return is_alive
    try:
        return time.time() - path.stat().st_mtime < STALE_SECONDS
    except OSError:
        return False


def wait_for_submission(folder: RunFolder, seconds: float = RECORDING_SECONDS) -> None:
    """Wait until no other process is submitting the run, but for at most `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while is_being_submitted(folder) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def lock_run_for_submission(folder: RunFolder) -> Iterator[None]:
    """Prevent other commands from submitting or starting a run inside the block.

    Raises RunTakenError if another command is already submitting or starting the run.
    """
    with convert_disk_errors(folder.path):
        locate_submission_file(folder).parent.mkdir(exist_ok=True)
    lock = try_to_lock(folder)
    if lock is None:
        raise RunTakenError(f"{folder.path.name} is being started or submitted by another command on this machine")
    with lock:
        create_submission_file(folder)
        try:
            yield
        finally:
            locate_submission_file(folder).unlink(missing_ok=True)


def create_submission_file(folder: RunFolder) -> None:
    """Create the submission file of a run, or replace an abandoned one.

    Raises RunTakenError if another submission is in progress.
    """
    path = locate_submission_file(folder)
    while True:
        try:
            with convert_disk_errors(path), open(path, "x") as file:
                file.write(json.dumps(provenance.identify_process()))
            return
        except FileExistsError:
            remove_stale_submission_file(folder)


def remove_stale_submission_file(folder: RunFolder) -> None:
    """Remove the file of an abandoned submission. Raises RunTakenError if the submission is still in progress."""
    path = locate_submission_file(folder)
    submitter = read_json(path)
    if is_being_submitted(folder):
        pid = submitter.get("pid", "?")
        host = submitter.get("host", "another host")
        raise RunTakenError(f"{folder.path.name} is being submitted by process {pid} on {host}; see make status")
    stale = path.with_name(f".stale-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # another command has already removed the file
        path.rename(stale)
        if read_json(stale) != submitter:  # this file belongs to a newer submission, so restore it
            with contextlib.suppress(FileExistsError):
                os.link(stale, path)
        stale.unlink()


# ---- the job of a run


def list_ids_of_this_job() -> list[str]:
    """Return the ids under which meta.json may list the job of this process."""
    return [provenance.read_job_id(), os.environ.get("SLURM_JOB_ID", "")]


def describe_other_owner(folder: RunFolder) -> str:
    """Describe the other job or attempt that the run belongs to. Return "" if the run belongs to this job.

    If no job is recorded, the submitting command was stopped too early, and the run belongs to this job.
    """
    meta = provenance.read_metadata(folder)
    if "job" not in meta:
        return ""
    job = meta["job"]
    if job is None:
        return "an attempt that was started without SLURM"
    return "" if job["id"] in list_ids_of_this_job() else f"job {job['id']}"


def check_run_belongs_to_this_job(folder: RunFolder) -> None:
    """Wait until the submission is recorded. Raises RunTakenError if the run does not belong to this job."""
    start = time.monotonic()
    while owner := describe_other_owner(folder):
        timeout = RECORDING_SECONDS if is_being_submitted(folder) else UNANNOUNCED_SECONDS
        if time.monotonic() - start > timeout:
            job = provenance.read_job_id()
            run = shlex.quote(folder.reference)
            raise RunTakenError(
                f"job {job} cannot start {folder.path.name}: the run belongs to {owner}; see make status RUN={run}"
            )
        time.sleep(POLL_SECONDS)
