"""Who may submit a run, and which job it belongs to. Imports no torch.

A command that submits a run holds the lock of the run and has a file in `submit/`, which only one process can create on
any host, from its look at the run's state until the job's id is in meta.json. A job that starts, or is queued again,
then finds whether the run is still its own.
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

from common.core.errors import RunTaken
from common.runs import claims, provenance
from common.runs.folder import Folder, disk_errors, read_json
from common.runs.run_lock import try_to_lock

STALE_SECONDS = 120.0
"""After so long a submission whose process cannot be seen from here counts as given up."""
RECORDING_SECONDS = 60.0
"""Time for which a job that has started waits until the command that submitted it has recorded it."""
UNANNOUNCED_SECONDS = 5.0
"""The same where no submission is under way that is known: the command may be of older source."""
POLL_SECONDS = 0.1


def locate_submission(folder: Folder) -> Path:
    """Return the path of the file that exists while a run is submitted."""
    return folder.path / "submit" / "submitting.json"


def is_being_submitted(folder: Folder) -> bool:
    """Check whether another process is about to submit the run."""
    path = locate_submission(folder)
    content = read_json(path)
    if content == provenance.identify_process():
        return False
    is_alive = claims.is_process_alive(content) if content else None
    if is_alive is not None:
        return is_alive
    try:
        return time.time() - path.stat().st_mtime < STALE_SECONDS
    except OSError:
        return False


def wait_for_submission(folder: Folder, seconds: float = RECORDING_SECONDS) -> None:
    """Wait until no command is about to submit the run, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while is_being_submitted(folder) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def hold_submission(folder: Folder) -> Iterator[None]:
    """Keep other commands from submitting or starting a run meanwhile. Raises RunTaken where one does so already."""
    with disk_errors(folder.path):
        locate_submission(folder).parent.mkdir(exist_ok=True)
    lock = try_to_lock(folder)
    if lock is None:
        raise RunTaken(f"{folder.path.name} is being started or submitted by another command on this machine")
    with lock:
        create_submission(folder)
        try:
            yield
        finally:
            locate_submission(folder).unlink(missing_ok=True)


def create_submission(folder: Folder) -> None:
    """Create the file of a submission; one that was given up is replaced.

    Raises RunTaken where another submission is under way.
    """
    path = locate_submission(folder)
    while True:
        try:
            with disk_errors(path), open(path, "x") as file:
                file.write(json.dumps(provenance.identify_process()))
            return
        except FileExistsError:
            remove_stale_submission(folder)


def remove_stale_submission(folder: Folder) -> None:
    """Remove the file of a submission that was given up. Raises RunTaken where it is under way."""
    path = locate_submission(folder)
    content = read_json(path)
    if is_being_submitted(folder):
        pid, host = content.get("pid", "?"), content.get("host", "another host")
        raise RunTaken(f"{folder.path.name} is being submitted by process {pid} on {host}; see make status")
    stale = path.with_name(f".stale-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # another command has removed it
        path.rename(stale)
        if read_json(stale) != content:  # it was created anew meanwhile: give it back
            with contextlib.suppress(FileExistsError):
                os.link(stale, path)
        stale.unlink()


# ---- the job of a run


def list_own_job_names() -> list[str]:
    """Return the ids under which meta.json may have the job that executes this process."""
    names = [os.environ.get("SLURM_JOB_ID", "")]
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        names.append(f"{array}_{task}")
    return names


def find_other_owner(folder: Folder) -> str:
    """Return what the run belongs to instead of this job; empty where it is this job's.

    A run whose job was never recorded is this job's: the command that submitted it was ended.
    """
    meta = provenance.read_metadata(folder)
    if "job" not in meta:
        return ""
    job = meta["job"]
    if job is None:
        return "an attempt that was started without SLURM"
    return "" if job["id"] in list_own_job_names() else f"job {job['id']}"


def check_run_is_own(folder: Folder) -> None:
    """Raise RunTaken where a run does not belong to this job any more; waits until its submission is recorded."""
    began = time.monotonic()
    while owner := find_other_owner(folder):
        waited = time.monotonic() - began
        allowed = RECORDING_SECONDS if is_being_submitted(folder) else UNANNOUNCED_SECONDS
        if waited > allowed:
            job, run = os.environ.get("SLURM_JOB_ID", ""), shlex.quote(folder.reference)
            raise RunTaken(
                f"job {job} does not start {folder.path.name}: the run belongs to {owner}; see make status RUN={run}"
            )
        time.sleep(POLL_SECONDS)
