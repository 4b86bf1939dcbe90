"""Exclusive submission of a run, and the job that the run belongs to. Imports no torch.

A command that submits a run holds the lock of the run and a file in `submit/`, which only one process on any host can
create. It holds them from reading the state of the run until the job id is in meta.json. A job that starts or is
requeued then checks whether the run still belongs to it.
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

from common.core.errors import RunTakenError
from common.runs import claims, provenance
from common.runs.folder import RunFolder, disk_errors, read_json
from common.runs.run_lock import try_to_lock

STALE_SECONDS = 120.0
"""Age at which a submission counts as abandoned, if this machine cannot check its process."""
RECORDING_SECONDS = 60.0
"""Time for which a started job waits until the command that submitted it has recorded its id."""
UNANNOUNCED_SECONDS = 5.0
"""The same without a submission file: a command of older source writes none."""
POLL_SECONDS = 0.1


def locate_submission(folder: RunFolder) -> Path:
    """Return the path of the file that exists while a run is submitted."""
    return folder.path / "submit" / "submitting.json"


def is_being_submitted(folder: RunFolder) -> bool:
    """Check whether another process is submitting the run."""
    path = locate_submission(folder)
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
    """Wait until no command is submitting the run, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while is_being_submitted(folder) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def hold_submission(folder: RunFolder) -> Iterator[None]:
    """Prevent other commands from submitting or starting a run. Raises RunTakenError if one does already."""
    with disk_errors(folder.path):
        locate_submission(folder).parent.mkdir(exist_ok=True)
    lock = try_to_lock(folder)
    if lock is None:
        raise RunTakenError(f"{folder.path.name} is being started or submitted by another command on this machine")
    with lock:
        create_submission(folder)
        try:
            yield
        finally:
            locate_submission(folder).unlink(missing_ok=True)


def create_submission(folder: RunFolder) -> None:
    """Create the file of a submission; an abandoned one is replaced. Raises RunTakenError during another submission."""
    path = locate_submission(folder)
    while True:
        try:
            with disk_errors(path), open(path, "x") as file:
                file.write(json.dumps(provenance.identify_process()))
            return
        except FileExistsError:
            remove_stale_submission(folder)


def remove_stale_submission(folder: RunFolder) -> None:
    """Remove the file of an abandoned submission. Raises RunTakenError if it is still running."""
    path = locate_submission(folder)
    submitter = read_json(path)
    if is_being_submitted(folder):
        pid = submitter.get("pid", "?")
        host = submitter.get("host", "another host")
        raise RunTakenError(f"{folder.path.name} is being submitted by process {pid} on {host}; see make status")
    stale = path.with_name(f".stale-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # another command has removed it
        path.rename(stale)
        if read_json(stale) != submitter:  # a new submission's file, created meanwhile: restore it
            with contextlib.suppress(FileExistsError):
                os.link(stale, path)
        stale.unlink()


# ---- the job of a run


def list_ids_of_this_job() -> list[str]:
    """Return the ids by which meta.json may name the job of this process."""
    names = [os.environ.get("SLURM_JOB_ID", "")]
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        names.append(f"{array}_{task}")
    return names


def find_other_owner(folder: RunFolder) -> str:
    """Return what the run belongs to instead of this job; "" if it belongs to this job.

    A run without a recorded job belongs to this job: the command that submitted it was stopped before.
    """
    meta = provenance.read_metadata(folder)
    if "job" not in meta:
        return ""
    job = meta["job"]
    if job is None:
        return "an attempt that was started without SLURM"
    return "" if job["id"] in list_ids_of_this_job() else f"job {job['id']}"


def check_run_is_own(folder: RunFolder) -> None:
    """Raise RunTakenError if the run does not belong to this job; waits until its submission is recorded."""
    start = time.monotonic()
    while owner := find_other_owner(folder):
        timeout = RECORDING_SECONDS if is_being_submitted(folder) else UNANNOUNCED_SECONDS
        if time.monotonic() - start > timeout:
            job = os.environ.get("SLURM_JOB_ID", "")
            run = shlex.quote(folder.reference)
            raise RunTakenError(
                f"job {job} does not start {folder.path.name}: the run belongs to {owner}; see make status RUN={run}"
            )
        time.sleep(POLL_SECONDS)
