"""The requeue policy, executed by the job script after its tasks have ended. Imports no torch.

    python -m slurm.scheduling.requeue RUN_FOLDER EXIT_STATUS

It runs outside the step, so it survives the death of any rank, including rank 0. A run that crashed or stopped on
request is requeued and resumes. A run that needs a person is not: an invalid setting, a loss that is NaN or infinite,
or several attempts in a row without a new checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from common.checkpoint import storage
from common.core import config
from common.core.errors import EXIT_RESUMABLE, UserError, exit_on_user_error
from common.core.signals import REQUESTED_STOP_STATUSES
from common.runs import provenance
from common.runs.folder import RunFolder, read_json, write_json
from common.runs.result import Result
from slurm.scheduling import submission
from slurm.scheduling.scheduler import Scheduler, parse_job_fields

EXIT_FAILED = EXIT_RESUMABLE + 1
"""Exit status of a rank that failed by itself.

srun reports the highest status: it must exceed that of ranks that were stopped because of the failure (75).
"""
CONTROLLER_TIMEOUT = 600.0
"""Seconds to wait for a controller that does not answer; it may be restarting."""
RETRY_SECONDS = 5.0


def note_refusal(folder: RunFolder, rank: int, reason: str, *, is_taken: bool = False) -> None:
    """Write down why a rank of this attempt refused to start, which only a person can fix.

    With `is_taken`, another attempt has the run, and this job must not change its result.
    """
    file = folder.path / "submit" / f"refused-{make_attempt_name()}-{rank:05d}.json"
    write_json(file, {"reason": reason, "is_taken": is_taken})


def read_refusals(folder: RunFolder) -> list[dict[str, object]]:
    """Read the refusals of this attempt's ranks, ordered by rank."""
    files = sorted((folder.path / "submit").glob(f"refused-{make_attempt_name()}-*.json"))
    return [read_json(file) for file in files]


def read_refusal(folder: RunFolder) -> str:
    """Read the reason of the lowest rank, or ""; other ranks may only know that a rank failed."""
    refusals = read_refusals(folder)
    return str(refusals[0].get("reason", "")) if refusals else ""


def find_taker(folder: RunFolder) -> str:
    """Return why the run does not belong to this job, which then must not change its result, or ""."""
    for refusal in read_refusals(folder):
        if refusal.get("is_taken"):
            return str(refusal["reason"])
    owner = submission.find_other_owner(folder)
    return f"the run belongs to {owner}" if owner else ""


def make_attempt_name() -> str:
    """Return the job id and its restart count, for names of files."""
    return f"{os.environ.get('SLURM_JOB_ID', '')}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def note_failure(folder: RunFolder) -> None:
    """Write down that a rank failed: ranks that srun kills afterwards hide its exit status."""
    with contextlib.suppress(UserError):  # the disk may be full; the status of srun remains
        write_json(locate_failure_note(folder), {"exit_status": 1})


def locate_failure_note(folder: RunFolder) -> Path:
    """Return the path of the note that a rank of this attempt failed first."""
    return folder.path / "submit" / f"failed-{make_attempt_name()}.json"


def find_newest_checkpoint(folder: RunFolder) -> list[int] | None:
    """Return attempt and step of the newest checkpoint of a run; None without one."""
    for attempt in reversed(folder.list_attempts()):
        steps = [checkpoint.step for checkpoint in storage.list_checkpoints(attempt)]
        if steps:
            return [attempt.number, steps[-1]]
    return None


def record_failure(folder: RunFolder) -> int:
    """Record a failure; returns how many in a row had no new checkpoint."""
    file = folder.path / "submit" / "failures.json"
    job = os.environ.get("SLURM_JOB_ID", "")
    newest = find_newest_checkpoint(folder)
    previous = read_json(file)
    count = previous.get("count")
    if previous.get("job") != job or not isinstance(count, int):
        count = 0
        previous = {"newest": None}
    count = count + 1 if newest == previous.get("newest") else 0
    write_json(file, {"job": job, "newest": newest, "count": count})
    return count


def find_reason_not_to_requeue(folder: RunFolder, status: int) -> str:
    """Return the reason not to requeue the job, or ""; counts a failure."""
    refusal = read_refusal(folder)
    if refusal:
        return refusal
    if status == 2:
        return "a rank refused to start; see the log"
    job = provenance.read_metadata(folder).get("job") or {}
    if not job.get("profile", {}).get("requeue", True):
        return "the profile says cluster.requeue=false"
    settings = config.read_config_file(folder.path / "submit" / "config.yaml")
    cfg = config.build_config(config.import_schema(folder.experiment), [settings])
    max_restarts = cfg.checkpoint.max_restarts
    failures = 0 if status in REQUESTED_STOP_STATUSES else record_failure(folder)
    if failures > max_restarts:
        return f"{failures} attempts in a row ended without a new checkpoint (checkpoint.max_restarts={max_restarts})"
    return ""


def is_latest_restart(scheduler: Scheduler, job: str) -> bool:
    """Check that the job runs and was neither restarted nor requeued since this restart began.

    SLURM does that if it believes this host dead, for instance one that the network has cut off. Waits for a
    controller that does not answer. Raises UserError after CONTROLLER_TIMEOUT seconds.
    """
    deadline = time.monotonic() + CONTROLLER_TIMEOUT
    while True:
        try:
            fields = parse_job_fields(scheduler.call("scontrol", "-o", "show", "job", job))
            return is_restart_of_this_process(fields)
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def is_restart_of_this_process(fields: Mapping[str, str]) -> bool:
    """Check that a job, by its fields of scontrol, runs and was not restarted since this process began."""
    return fields.get("JobState") == "RUNNING" and fields.get("Restarts") == os.environ.get("SLURM_RESTART_COUNT", "0")


def requeue_or_fail(folder: RunFolder, scheduler: Scheduler, job: str, status: int, reason: str) -> int:
    """Requeue a job, or record the reason not to; returns the exit status of this restart."""
    if not reason:
        try:
            scheduler.call("scontrol", "requeue", job)  # also ends this process
            return EXIT_RESUMABLE
        except UserError as error:
            if not is_latest_restart(scheduler, job):
                return EXIT_RESUMABLE
            reason = f"it cannot be queued again: {error}"
    Result("failed", status or 1, reason, folder.find_last_step()).write_once(folder)
    provenance.record_attempt_end(folder, "failed")
    print(f"not started again: {reason}", file=sys.stderr)
    return status or 1


def main(path: str, status: int) -> int:
    """Requeue a job whose tasks have ended, or record why not; returns the exit status of the job."""
    folder = RunFolder(Path(path))
    job = os.environ["SLURM_JOB_ID"]
    scheduler = Scheduler("SLURM")
    if status == EXIT_FAILED or locate_failure_note(folder).exists():
        status = 1
    if taker := find_taker(folder):
        print(f"not started again: {taker}", file=sys.stderr)
        return status or 1
    if folder.result or status == 0:  # with 0 and no result, a newer attempt has the run
        recorded_status = folder.result.get("exit_status")
        return recorded_status if isinstance(recorded_status, int) else status
    if not is_latest_restart(scheduler, job):
        print(f"job {job} is already queued again", flush=True)
        return status
    if read_refusal(folder):
        status = 2  # srun may report the signal that ended the other ranks
    reason = find_reason_not_to_requeue(folder, status)
    if not reason:
        cause = "stopped on request" if status in REQUESTED_STOP_STATUSES else f"failed with exit status {status}"
        print(f"the ranks {cause}; job {job} is queued again", flush=True)
    return requeue_or_fail(folder, scheduler, job, status, reason)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
