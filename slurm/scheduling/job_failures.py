"""Failures of the ranks of a job. This module does not import torch.

submit/failure-JOB-RESTART-RANK.json    cause, message and time of the failure of one rank; `is_refusal` is true if the
                                        user must fix the problem, so that the job is not requeued

Each rank writes its own file, so the cause of the job's failure does not depend on the order in which ranks write. A
rank writes this record even if it fails before its job has opened an attempt of the run.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass

from common.runs import provenance
from common.runs.failures import Failure
from common.runs.folder import RunFolder, read_json, write_json
from common.system.errors import UserError


@dataclass(frozen=True)
class JobFailure:
    """Failure of one rank of a job."""

    failure: Failure
    is_refusal: bool
    """Whether the user must fix the problem, so that the job is not requeued."""
    job_start: str
    """Job id and restart count of the job, as returned by `make_attempt_name`."""


def make_attempt_name() -> str:
    """Return the job id and restart count of this process, for use in file names."""
    return f"{provenance.read_job_id()}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def record_job_failure(folder: RunFolder, rank: int, failure: Failure, *, is_refusal: bool) -> None:
    """Record that a rank of this job has failed. If the disk fails, the failure is not recorded.

    The exit status of srun may be that of another rank, because srun kills the other ranks after a failure.
    """
    file = folder.path / "submit" / f"failure-{make_attempt_name()}-{rank:05d}.json"
    with contextlib.suppress(UserError, OSError):
        write_json(file, asdict(failure) | {"is_refusal": is_refusal})


def read_job_failures(folder: RunFolder, attempt_name: str = "*", rank: int | None = None) -> list[JobFailure]:
    """Return the recorded failures of ranks, ordered by rank.

    The failures are those of all jobs and ranks of a run if `attempt_name` and `rank` are not given.
    """
    number = "*" if rank is None else f"{rank:05d}"
    files = (folder.path / "submit").glob(f"failure-{attempt_name}-{number}.json")
    failures = []
    for file in sorted(files, key=lambda path: path.stem.rpartition("-")[2]):
        content = read_json(file)
        failure = Failure.from_content(content)
        if failure is not None:
            job_start = file.stem.removeprefix("failure-").rpartition("-")[0]
            failures.append(JobFailure(failure, bool(content.get("is_refusal")), job_start))
    return failures


def find_refusal(folder: RunFolder) -> Failure | None:
    """Return why this job must not be requeued, or None if no rank has refused to start or to continue.

    This is the refusal of the lowest rank. Higher ranks may have recorded only that another rank failed. Refusals that
    another rank may have caused are used only if there are no others.
    """
    recorded = read_job_failures(folder, make_attempt_name())
    refusals = [rank.failure for rank in recorded if rank.is_refusal]
    return min(refusals, key=lambda refusal: refusal.blames_peer, default=None)


def find_first_failure(folder: RunFolder) -> Failure | None:
    """Return the first failure of a rank that did not refuse to start or to continue, or None if there is none.

    Failures that another rank may have caused are used only if there are no others.
    """
    recorded = read_job_failures(folder, make_attempt_name())
    failures = [rank.failure for rank in recorded if not rank.is_refusal]
    return min(failures, key=lambda failure: (failure.blames_peer, failure.time), default=None)


def find_newest_failure_of_rank(folder: RunFolder, rank: int, start: float) -> JobFailure | None:
    """Return the newest failure of a rank in any job of a run, or None if the rank has not failed since `start`.

    `start` is in seconds since 1970.
    """
    recent = [recorded for recorded in read_job_failures(folder, rank=rank) if recorded.failure.time >= start]
    return max(recent, key=lambda recorded: recorded.failure.time, default=None)
