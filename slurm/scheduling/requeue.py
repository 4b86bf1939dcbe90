"""Program that requeues a job after its tasks have ended. The job script executes the program.

    python -m slurm.scheduling.requeue RUN_FOLDER EXIT_STATUS

The program runs outside the job step, so it survives the failure of any rank, including rank 0. The job
of a run that crashed or was stopped on request is requeued, and the run then resumes. A job is not requeued if the user
must fix a problem, such as an invalid setting, a loss that is NaN or infinite, or repeated failures without a new
checkpoint.
This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from common.checkpoint import storage
from common.config import config
from common.runs import provenance
from common.runs.folder import RunFolder, read_json, write_json
from common.runs.result import Result
from common.system.causes import Cause
from common.system.errors import UserError, exit_on_user_error
from common.system.exit_status import EXIT_FAILED, EXIT_RESUMABLE
from common.system.output import discard_unwritable_output
from common.system.signals import REQUESTED_STOP_STATUSES
from slurm.scheduling import submission
from slurm.scheduling.job_failures import find_first_failure, find_refusal, make_attempt_name, read_job_failures
from slurm.scheduling.scheduler import Scheduler, parse_job_fields

CONTROLLER_TIMEOUT = 600.0
"""Maximum time, in seconds, to wait for an unresponsive SLURM controller, which may be restarting."""
RETRY_SECONDS = 5.0


def read_cause_of_failure(folder: RunFolder) -> Cause:
    """Read the cause of this attempt's failure, as recorded by its ranks."""
    failure = find_refusal(folder) or find_first_failure(folder)
    return failure.cause if failure is not None else Cause.OTHER


def describe_other_owner_of_run(folder: RunFolder) -> str:
    """Return why the run does not belong to this job, or "" if the run belongs to this job.

    A job must not change the result of a run that belongs to another job.
    """
    for recorded in read_job_failures(folder, make_attempt_name()):
        if recorded.failure.cause is Cause.RUN_TAKEN:
            return recorded.failure.message
    owner = submission.describe_other_owner(folder)
    return f"the run belongs to {owner}" if owner else ""


def find_newest_checkpoint(folder: RunFolder) -> list[int] | None:
    """Return the attempt and step of the newest checkpoint of a run, or None if there is no checkpoint."""
    for attempt in reversed(folder.list_attempts()):
        steps = [checkpoint.step for checkpoint in storage.list_checkpoints(attempt)]
        if steps:
            return [attempt.number, steps[-1]]
    return None


def count_failures_without_checkpoint(folder: RunFolder) -> int:
    """Record a failure, and return the number of failures in a row without a new checkpoint.

    If the disk fails, the failure is not recorded.
    """
    file = folder.path / "submit" / "failures.json"
    job = provenance.read_job_id()
    newest = find_newest_checkpoint(folder)
    previous = read_json(file)
    count = previous.get("count")
    if previous.get("job") != job or not isinstance(count, int):
        count = 0
        previous = {"newest": None}
    count = count + 1 if newest == previous.get("newest") else 0
    with contextlib.suppress(UserError, OSError):  # a full disk must not prevent the requeue
        write_json(file, {"job": job, "newest": newest, "count": count})
    return count


def find_reason_not_to_requeue(folder: RunFolder, status: int) -> str:
    """Return why the job should not be requeued, or "" if the job should be requeued.

    A job that was not stopped on request is recorded as a failure.
    """
    refusal = find_refusal(folder)
    if refusal is not None:
        return refusal.message
    if status == 2:
        return "a rank could not start; see the log"
    job = provenance.read_metadata(folder).get("job") or {}
    if not job.get("profile", {}).get("requeue", True):
        return "cluster.requeue=false in the cluster profile disables requeueing"
    settings = config.read_config_file(folder.path / "submit" / "config.yaml")
    cfg = config.build_config(config.import_schema(folder.experiment), [settings])
    max_restarts = cfg.checkpoint.max_restarts
    failures = 0 if status in REQUESTED_STOP_STATUSES else count_failures_without_checkpoint(folder)
    if failures > max_restarts:
        return f"{failures} attempts in a row ended without a new checkpoint (checkpoint.max_restarts={max_restarts})"
    return ""


def is_latest_restart(scheduler: Scheduler, job: str) -> bool:
    """Return whether the job is running and this process belongs to its latest restart.

    SLURM requeues the job if SLURM considers this host lost, for example after a network failure. If the controller
    does not answer, the query is repeated. Raises UserError if there is no answer within CONTROLLER_TIMEOUT seconds.
    """
    deadline = time.monotonic() + CONTROLLER_TIMEOUT
    while True:
        try:
            fields = parse_job_fields(scheduler.run_command("scontrol", "-o", "show", "job", job))
            return is_restart_of_this_process(fields)
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def is_restart_of_this_process(fields: Mapping[str, str]) -> bool:
    """Return whether a job is running and has not been restarted since this process started.

    `fields` contains the fields that `scontrol show job` prints.
    """
    return fields.get("JobState") == "RUNNING" and fields.get("Restarts") == os.environ.get("SLURM_RESTART_COUNT", "0")


def requeue_job_or_record_failure(folder: RunFolder, scheduler: Scheduler, job: str, status: int, reason: str) -> int:
    """Requeue a job, or record the reason for not requeueing it. Return the exit status of this attempt."""
    if not reason:
        try:
            scheduler.run_command("scontrol", "requeue", job)  # also terminates this process
            return EXIT_RESUMABLE
        except UserError as error:
            if not is_latest_restart(scheduler, job):
                return EXIT_RESUMABLE
            reason = f"the job cannot be requeued: {error}"
    cause = read_cause_of_failure(folder)
    state = "preempted" if status in REQUESTED_STOP_STATUSES else "failed"
    Result(state, status or 1, reason, folder.find_last_step(), cause).write_once(folder)
    provenance.record_attempt_end(folder, state)
    print(f"not requeued: {reason}", file=sys.stderr)
    return status or 1


def main(path: str, status: int) -> int:
    """Requeue a job whose tasks have ended, or record why the job is not requeued. Return the job's exit status."""
    folder = RunFolder(Path(path))
    job = provenance.read_job_id()
    scheduler = Scheduler("SLURM")
    if status == EXIT_FAILED or find_first_failure(folder) is not None:
        status = 1
    if taker := describe_other_owner_of_run(folder):
        print(f"not requeued: {taker}", file=sys.stderr)
        return status or 1
    if folder.result or status == 0:  # status 0 without a result: the run belongs to a newer attempt
        recorded_status = folder.result.get("exit_status")
        return recorded_status if isinstance(recorded_status, int) else status
    if not is_latest_restart(scheduler, job):
        print(f"job {job} has already been requeued", flush=True)
        return status
    if find_refusal(folder) is not None:
        status = 2  # srun may report the signal that ended the other ranks
    reason = find_reason_not_to_requeue(folder, status)
    if not reason:
        end = "stopped on request" if status in REQUESTED_STOP_STATUSES else f"failed with exit status {status}"
        print(f"the ranks {end}; requeueing job {job}", flush=True)
    return requeue_job_or_record_failure(folder, scheduler, job, status, reason)


if __name__ == "__main__":
    discard_unwritable_output()
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
