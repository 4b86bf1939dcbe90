"""The requeue policy, executed by the job script after its tasks have ended. Imports no torch.

    python -m slurm.scheduling.requeue RUN_FOLDER EXIT_STATUS

It stands outside the step, so it is there whichever rank died, rank 0 included. A run that crashed, or stopped on
request, is queued again and resumes. One that a person must look at is not: a wrong setting, a loss that is no number,
or attempts in a row that reached no new checkpoint.
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
from common.core.signals import NOTICED_STATUSES
from common.runs import provenance
from common.runs.folder import Folder, read_json, write_json
from common.runs.result import Result
from slurm.scheduling import submission
from slurm.scheduling.scheduler import Scheduler, parse_job_fields

EXIT_FAILED = EXIT_RESUMABLE + 1
"""Status of a rank that failed by itself. It is above 75, so that srun, which reports the highest status, shows it
rather than the 75 of ranks stopped in its wake."""
PATIENCE = 600.0  # seconds for a controller that does not answer: it may be starting again
PAUSE = 5.0


def note_refusal(folder: Folder, rank: int, reason: str, *, is_taken: bool = False) -> None:
    """Note, for this attempt of the job, a reason that only a person can remove.

    With `is_taken` another attempt has the run, whose result is none of this job's business.
    """
    file = folder.path / "submit" / f"refused-{make_attempt_name()}-{rank:05d}.json"
    write_json(file, {"reason": reason, "is_taken": is_taken})


def read_refusals(folder: Folder) -> list[dict[str, object]]:
    """Read the notes of this attempt's ranks, that of the lowest rank first."""
    notes = sorted((folder.path / "submit").glob(f"refused-{make_attempt_name()}-*.json"))
    return [read_json(note) for note in notes]


def read_refusal(folder: Folder) -> str:
    """Read the reason noted by the lowest rank; empty without one. Other ranks may only know that one failed."""
    notes = read_refusals(folder)
    return str(notes[0].get("reason", "")) if notes else ""


def find_taker(folder: Folder) -> str:
    """Return why the run is not this job's any more, so that its result stays as it is; empty where it is."""
    for note in read_refusals(folder):
        if note.get("is_taken"):
            return str(note["reason"])
    owner = submission.find_other_owner(folder)
    return f"the run belongs to {owner}" if owner else ""


def make_attempt_name() -> str:
    """Join the job and its number of restarts, as part of a file's name."""
    return f"{os.environ.get('SLURM_JOB_ID', '')}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def note_failure(folder: Folder) -> None:
    """Note that a rank failed before srun ended any in this attempt: one that srun has to kill hides its status."""
    with contextlib.suppress(UserError):  # a full disk: srun's own status has to do
        write_json(locate_failure_note(folder), {"exit_status": 1})


def locate_failure_note(folder: Folder) -> Path:
    """Return the path of the note that a rank of this attempt of the job failed first."""
    return folder.path / "submit" / f"failed-{make_attempt_name()}.json"


def record_failure(folder: Folder) -> int:
    """Record on disk that this attempt failed; return how many of this job in a row have without a new checkpoint."""
    file, job = folder.path / "submit" / "failures.json", os.environ.get("SLURM_JOB_ID", "")
    found = [[attempt.number, s.step] for attempt in folder.attempts() for s in storage.list_checkpoints(attempt)]
    newest = found[-1] if found else None
    known = read_json(file)
    counted = known.get("count")
    if known.get("job") != job or not isinstance(counted, int):
        counted, known = 0, {"newest": None}
    count = counted + 1 if newest == known.get("newest") else 0
    write_json(file, {"job": job, "newest": newest, "count": count})
    return count


def find_reason_not_to_requeue(folder: Folder, status: int) -> str:
    """Find the reason not to requeue the job, empty where it is requeued; a failure is counted."""
    refused = read_refusal(folder)
    if refused:
        return refused
    if status == 2:
        return "a rank refused to start; see the log"
    job = provenance.read_metadata(folder).get("job") or {}
    if not job.get("profile", {}).get("requeue", True):
        return "the profile says cluster.requeue=false"
    name, given = folder.experiment, folder.path / "submit" / "config.yaml"
    allowed = config.build_config(config.import_schema(name), [config.read_config_file(given)]).checkpoint.max_restarts
    failed = 0 if status in NOTICED_STATUSES else record_failure(folder)
    if failed > allowed:
        return f"{failed} attempts in a row ended without a new checkpoint (checkpoint.max_restarts={allowed})"
    return ""


def is_latest_restart(scheduler: Scheduler, job: str) -> bool:
    """Check that SLURM runs the job and has not restarted it since this restart began, or queued it again.

    It has if it took this host, cut off by the network, for dead. Waits for a controller that does not answer; raises
    UserError if that lasts too long.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            known = parse_job_fields(scheduler.call("scontrol", "-o", "show", "job", job))
            break
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(PAUSE)
    return is_restart_of_this_process(known)


def is_restart_of_this_process(known: Mapping[str, str]) -> bool:
    """Check that a job, as scontrol shows it, runs and has not been restarted since this process began."""
    return known.get("JobState") == "RUNNING" and known.get("Restarts") == os.environ.get("SLURM_RESTART_COUNT", "0")


def requeue_or_fail(folder: Folder, scheduler: Scheduler, job: str, status: int, reason: str) -> int:
    """Queue a job again, or note the reason not to; returns the exit status of this restart."""
    if not reason:
        try:
            scheduler.call("scontrol", "requeue", job)  # ends this process, too
            return EXIT_RESUMABLE
        except UserError as error:
            if not is_latest_restart(scheduler, job):
                return EXIT_RESUMABLE
            reason = f"it cannot be queued again: {error}"
    Result("failed", status or 1, reason, folder.find_last_step()).write_unless_there(folder)
    provenance.record_attempt_end(folder, "failed")
    print(f"not started again: {reason}", file=sys.stderr)
    return status or 1


def main(path: str, status: int) -> int:
    """Requeue a job whose tasks have ended, or note why not; returns the exit status of the job."""
    folder, job, scheduler = Folder(Path(path)), os.environ["SLURM_JOB_ID"], Scheduler("SLURM")
    status = 1 if status == EXIT_FAILED or locate_failure_note(folder).exists() else status
    if taker := find_taker(folder):
        print(f"not started again: {taker}", file=sys.stderr)
        return status or 1
    if folder.result or status == 0:  # with 0 and no result, a newer attempt has overtaken this one
        known = folder.result.get("exit_status")
        return known if isinstance(known, int) else status
    if not is_latest_restart(scheduler, job):
        print(f"job {job} is queued again already", flush=True)
        return status
    status = 2 if read_refusal(folder) else status  # srun may tell of the signal by which it ended the others
    reason = find_reason_not_to_requeue(folder, status)
    if not reason:
        how = "stopped on request" if status in NOTICED_STATUSES else f"failed with exit status {status}"
        print(f"the ranks {how}; job {job} is queued again", flush=True)
    return requeue_or_fail(folder, scheduler, job, status, reason)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
