"""Diagnosis of a run that failed or hangs, from the files in the run folder. This module does not import torch.

The diagnosis contains the first error of any rank, the last step of each rank, the code line where a rank was stuck,
the slow rank if there is one, and the likely cause in one line.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
import time
from typing import Any

from common.checkpoint import storage
from common.runs import claims, provenance
from common.runs.failures import Failure, read_failure
from common.runs.folder import RunFolder
from common.runs.rank_changes import describe_rank_changes
from common.system.causes import PEER_CAUSES, Cause
from common.system.disk_problems import DISK_PROBLEMS
from common.system.text import format_duration, read_end_of_file
from slurm.reports import rank_logs, status, training_progress
from slurm.reports.heartbeats import Heartbeat, describe_slow_rank, find_slow_rank, read_heartbeats
from slurm.reports.selection import parse_float, read_newest_settings, read_step_timeout
from slurm.reports.status import FINAL_STATES
from slurm.scheduling import job_failures

SILENCE_SECONDS = 60.0  # a run hangs after at least this time without a sign of life
NO_PROBLEM = "no problem detected; running"
EXPLANATIONS = {
    Cause.OUT_OF_MEMORY: (
        "out of memory; lower batch, use more microbatches, or request more memory with cluster.memory_gb"
    ),
    Cause.THREAD_SHORTAGE: (
        "no more threads or processes can be started; raise ulimit -u or the control group's pids.max, or lower "
        "launch.threads or data.workers"
    ),
    Cause.DISK_FULL: f"{DISK_PROBLEMS[Cause.DISK_FULL]}, or set runs=<another folder>",
    Cause.DISK_READ_ONLY: "the disk is read-only; set runs=<another folder>",
    Cause.DIVERGED: "training diverged; lower optim.lr, or set clip if the experiment has this setting",
    Cause.DAMAGED_DATA: "the data is damaged or has changed",
    Cause.JOB_TIME_LIMIT: "the job reached its time limit; raise cluster.time, or run make exp RESUME=<id>",
    Cause.HOST_FAILED: "a host failed; to resume the run: make exp RESUME=<id>",
    Cause.JOB_OUT_OF_MEMORY: "out of memory; request more memory with cluster.memory_gb",
    Cause.MISSING_PACKAGE: "a Python package is missing; to check all hosts: make doctor NODES=2",
}
"""Explanation, with a remedy, of causes that need no further details. Earlier entries have priority."""


@dataclasses.dataclass(frozen=True)
class LikelyCause:
    """Likely cause of a run's problem."""

    text: str = ""
    """Explanation in one line; empty if there is no problem."""
    cause: Cause = Cause.OTHER


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """Facts about one rank, as read from the run folder."""

    heartbeat: Heartbeat
    last_sign: float
    """Time of the rank's newest sign of life, in seconds since 1970."""
    error_time: str
    """Time of the rank's first error as text, or an empty string if the time is unknown."""
    error: str
    """First error of the rank, or an empty string if there is no error."""
    stack: str
    """Code lines that the rank was executing when a step took too long, or an empty string."""
    exit_reason: str = ""
    """How the rank ended according to srun, such as `Killed`, or an empty string if unknown."""
    cause: Cause = Cause.OTHER
    """Cause of the rank's first error."""

    @property
    def name(self) -> str:
        """Number and host of the rank for messages, such as `rank 1 on node2`."""
        return f"rank {self.heartbeat.rank} on {self.heartbeat.host}"

    @property
    def age(self) -> float:
        """Seconds since the rank's newest sign of life."""
        return max(0.0, time.time() - self.last_sign)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as a dict for the JSON output."""
        return dataclasses.asdict(self.heartbeat) | {
            "when": self.error_time,
            "error": self.error,
            "stands": self.stack,
            "ended": self.exit_reason,
            "age": self.age,
        }


def find_last_sign_of_life(attempt: RunFolder) -> float:
    """Return the newest modification time of an attempt's files other than heartbeats.

    The time is in seconds since 1970, or 0 if the attempt has no such files.
    """
    paths = [attempt.attempt_folder / name for name in ("attempt.json", "world.json", "logs")]
    paths += attempt.attempt_folder.glob("logs/rank-*.log")
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def read_rank_facts(folder: RunFolder) -> list[RankFacts]:
    """Return the facts about all ranks of a run's newest attempt."""
    ranks = []
    job_log = rank_logs.read_job_log(folder, 0)  # srun writes to the log of rank 0
    exit_reasons = rank_logs.parse_task_exit_reasons(job_log)
    for attempt in folder.list_attempts()[-1:]:
        start = find_last_sign_of_life(attempt)  # used for ranks that have not written a heartbeat
        for heartbeat in read_heartbeats(attempt):
            rank = heartbeat.rank
            log = f"{read_end_of_file(attempt.log_file(rank))}\n{rank_logs.read_job_log(folder, rank)}"
            error_time, error, cause = find_error_of_rank(attempt, rank, log)
            last_sign = heartbeat.time or start
            stack = rank_logs.find_stack_position(log)
            exit_reason = exit_reasons.get(rank, "")
            ranks.append(RankFacts(heartbeat, last_sign, error_time, error, stack, exit_reason, cause))
    return ranks


def find_error_of_rank(attempt: RunFolder, rank: int, log: str) -> tuple[str, str, Cause]:
    """Return the time, the text and the cause of a rank's first error, as recorded by the rank.

    A rank of a job that fails before it trains has only a record of the job. If there is no record, the error is the
    first error in the rank's log. The time is an empty string if unknown. The text is empty if there is no error.
    """
    failure = find_recorded_failure(attempt, rank)
    if failure is None:
        logged = rank_logs.find_first_error(log)
        return logged.time, logged.text, rank_logs.classify_logged_error(attempt, logged)
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
    return f"{seconds},{int(failure.time % 1 * 1000):03d}", failure.message, failure.cause


def find_recorded_failure(attempt: RunFolder, rank: int) -> Failure | None:
    """Return the failure of a rank in an attempt, or in a later job that failed before it opened an attempt.

    Returns None if there is no record.
    """
    claim = claims.Claim.read(attempt)
    failure = read_failure(attempt, rank)
    job_failure = job_failures.find_newest_failure_of_rank(attempt, rank, start=claim.time if claim else 0.0)
    if job_failure is None:
        return failure
    if failure is None:
        return job_failure.failure

    # The job of the attempt may have recorded the same failure again, with fewer details.
    is_job_of_attempt = claim is not None and job_failure.job_start == f"{claim.job}-{claim.restart}"
    if is_job_of_attempt or job_failure.failure.time < failure.time:
        return failure
    return job_failure.failure


def list_failed_ranks(ranks: list[RankFacts]) -> list[RankFacts]:
    """Return the ranks that have an error, sorted by the time of the error.

    Ranks whose error time is unknown come last.
    """
    failed = [rank for rank in ranks if rank.error]
    return sorted(failed, key=lambda rank: (not rank.error_time, rank.error_time))


def find_explained_cause(run_cause: Cause, failed: list[RankFacts]) -> LikelyCause | None:
    """Return the first cause in EXPLANATIONS that is the cause of a failed rank or of the run's failure.

    Returns None if there is no such cause.
    """
    for cause, explanation in EXPLANATIONS.items():
        for rank in failed:
            if rank.cause is cause:
                return LikelyCause(f"{rank.name}: {explanation}", cause)
        if run_cause is cause:
            return LikelyCause(explanation, cause)
    return None


def describe_lost_ranks(ranks: list[RankFacts]) -> str:
    """Describe the ranks that ended without an error message, if other ranks have errors.

    Returns an empty string if all ranks have errors or no rank has an error.
    """
    silent = [rank for rank in ranks if not rank.error]
    if not silent or len(silent) == len(ranks):
        return ""
    unknown = "it may have been killed or run out of memory, or its host may have failed"
    exit_reasons = [f"{rank.name} ended without an error message ({rank.exit_reason or unknown})" for rank in silent]
    return f"{', '.join(exit_reasons)}; the other ranks then lost their connections"


def describe_run_exit(folder: RunFolder) -> str:
    """Return a sentence that describes how a run without an error message ended."""
    code = folder.result.get("exit_status")
    if not isinstance(code, int):
        exit_reason = "the ranks were killed, or the machine failed"
    elif 128 < code < 128 + signal.NSIG:
        exit_reason = f"signal {signal.strsignal(code - 128) or code - 128}"
    else:
        exit_reason = f"exit status {code}"
    return f"all ranks ended without an error message: {exit_reason}"


def diagnose_running_run(ranks: list[RankFacts], last_step: int, max_silence: float) -> str:
    """Return whether a running run hangs, has a slow rank, or has no problem.

    A run hangs if no rank has shown a sign of life for `max_silence` seconds. A run without ranks has just started.
    Ranks that an elastic run has lost are ignored.
    """
    ranks = [rank for rank in ranks if not rank.heartbeat.is_lost]
    if not ranks or min(rank.age for rank in ranks) < max_silence:
        return describe_slow_rank([rank.heartbeat for rank in ranks]) or NO_PROBLEM
    behind = min(ranks, key=lambda rank: (rank.heartbeat.step, rank.last_sign))
    silence = f"no sign of life from {behind.name} for {format_duration(behind.age)}"
    return f"the run hangs after step {last_step}: {silence}"


def find_likely_cause(
    folder: RunFolder, state: str, detail: str, run_cause: Cause, ranks: list[RankFacts]
) -> LikelyCause:
    """Return the likely cause of a run's problem.

    The text is empty if the run was canceled, or has finished without a slow rank. `state`, `detail` and `run_cause`
    are the state of the run, its explanation, and the cause of a failure.
    """
    if state == "FINISHED":
        return LikelyCause(describe_slow_rank([rank.heartbeat for rank in ranks]))
    if state == "CANCELLED":
        return LikelyCause()
    if state == "RUNNING":
        max_silence = max(SILENCE_SECONDS, read_step_timeout(folder))
        return LikelyCause(diagnose_running_run(ranks, training_progress.read_last_step(folder), max_silence))

    return explain_failure(folder, detail, run_cause, ranks)


def explain_failure(folder: RunFolder, detail: str, run_cause: Cause, ranks: list[RankFacts]) -> LikelyCause:
    """Return the likely cause of a run's failure.

    Errors that another rank caused, such as lost connections, are used only if no rank has an error of another kind.
    """
    failed = list_failed_ranks(ranks)
    # The culprits are the ranks whose error was not caused by another rank.
    culprits = [rank for rank in failed if rank.cause not in PEER_CAUSES]
    explained = find_explained_cause(run_cause, culprits)
    if explained:
        return explained
    if culprits:
        return LikelyCause(f"{culprits[0].name} failed first: {culprits[0].error}", culprits[0].cause)

    # All errors were caused by other ranks. Such an error may name the rank that stopped or was killed.
    for rank in failed:
        if rank.cause is Cause.SILENT_RANK:
            return LikelyCause(rank.error, rank.cause)
    if run_cause in (Cause.KILLED, Cause.EXITED):
        return LikelyCause(detail, run_cause)
    last_resort = failed[0].error if failed else describe_run_exit(folder)
    return LikelyCause(describe_lost_ranks(ranks) or detail or last_resort, run_cause)


def collect_diagnosis(folder: RunFolder) -> dict[str, Any]:
    """Return the diagnosis of a run as a dict, which JSON=1 prints."""
    state, detail, run_cause = status.read_state_and_cause(folder)
    ranks = read_rank_facts(folder)
    failed = list_failed_ranks(ranks)
    slow = find_slow_rank([rank.heartbeat for rank in ranks])
    attempts = folder.list_attempts()
    likely = find_likely_cause(folder, state, detail, run_cause, ranks)
    return {
        "run": folder.path.name,
        "state": state.lower(),
        "detail": detail,
        "attempts": len(attempts),
        "step": training_progress.read_last_step(folder),
        "ranks": [rank.to_dict() for rank in ranks],
        "first_error": failed[0].to_dict() if failed else None,
        "ranks_changed": describe_rank_changes(attempts[-1]) if attempts else [],
        "straggler": slow.rank if slow else None,
        "cause": likely.text,
        "cause_kind": likely.cause,
    }


def choose_resume_command(folder: RunFolder, cause: Cause) -> str:
    """Return the command that continues an ended run, given the likely cause of its end.

    If the source code of the run has an error, the command starts a new run. The returned text may also contain advice.
    """
    resume = f"make exp RESUME={shlex.quote(folder.reference)}"
    if cause is Cause.SOURCE_ERROR:
        command = provenance.format_new_run_command(folder)
        return f"{command} after fixing the error ({provenance.describe_old_source(folder)})"
    if cause is Cause.NO_VALID_CHECKPOINT:
        return f"{resume} after removing {folder.path}/attempts/*/checkpoints; the run then restarts from step 0"
    if cause is Cause.DIVERGED:
        rate = parse_float(read_newest_settings(folder).get("optim.lr", "")) or 0
        return f'{resume} ARGS="optim.lr={rate / 2:g}" (lower than the current learning rate, {rate:g})'
    if cause in (Cause.OUT_OF_MEMORY, Cause.JOB_OUT_OF_MEMORY):
        job = provenance.read_metadata(folder).get("job")
        command = f'{resume} ARGS="cluster.memory_gb=..."' if job else f"{resume} on a machine with more memory"
        return f"{command}, or start a new run with a smaller batch or model; an unchanged run would fail again"
    has_checkpoint = storage.list_resumable_checkpoints(folder) or storage.list_lost_checkpoints(folder)
    return resume if has_checkpoint else f"{resume} (no checkpoint found; the run restarts from step 0)"


def print_rank_facts(facts: dict[str, Any]) -> None:
    """Print a rank's newest heartbeat and, if known, the line where the rank was stuck."""
    age = f"{format_duration(facts['age'])} ago"
    line = f"  rank {facts['rank']:<3}  {facts['host']:<12}  heartbeat at step {facts['step']:>7}  {age:>10}"
    if facts["before_backward"]:
        line += f"  backward starts after {facts['before_backward'] * 1e3:.1f} ms"
    print(line)
    if facts["stands"]:
        print(f"            stuck at {facts['stands']}")


def print_diagnosis(folder: RunFolder, as_json: bool) -> int:
    """Print the diagnosis of a run as text or JSON, and return the exit status.

    JSON is for scripts, so the exit status is 1 if the output is JSON and the run has a problem. Otherwise, the exit
    status is 0.
    """
    facts = collect_diagnosis(folder)
    state = facts["state"]
    cause = facts["cause"]
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0 if state in ("finished", "pending", "cancelled") or cause == NO_PROBLEM else 1
    print(f"{facts['run']} is {state.upper()}: {facts['detail']}".removesuffix(": "))
    print(f"  last step  {facts['step']}")
    for rank in facts["ranks"]:
        print_rank_facts(rank)
    for change in facts["ranks_changed"]:
        print(f"  ranks changed: {change}")
    if facts["first_error"]:
        first = facts["first_error"]
        print(f"  first error  {first['when']} rank {first['rank']} on {first['host']}: {first['error']}")
    if cause:
        print(f"  {'note' if state == 'finished' else 'likely cause'}  {cause}")
    if state.upper() in FINAL_STATES and state != "finished":
        print(f"  continue with  {choose_resume_command(folder, facts['cause_kind'])}")
    return 0
