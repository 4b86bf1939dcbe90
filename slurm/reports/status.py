"""Read the state, progress and description of runs. This module does not import torch.

The state of a run is read from result.json, from the process that runs the newest attempt, or from SLURM (squeue,
scontrol and sacct). SLURM accounting is optional. A run is LOST if these sources show neither that the run is active
nor how the run ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from common.runs import claims, description, provenance
from common.runs import result as results
from common.runs.folder import RunFolder
from common.runs.rank_changes import describe_rank_changes
from common.system.causes import Cause
from common.system.disk_problems import DISK_PROBLEMS
from common.system.text import format_duration
from slurm.local_cluster import cluster
from slurm.reports import heartbeats, selection
from slurm.reports.training_progress import read_training_progress
from slurm.scheduling import submission
from slurm.scheduling.scheduler import COMMAND_TIMEOUT, LOCAL_CLUSTER_NAME, STATUS_TIMEOUT, Scheduler

FINAL_STATES = ("FINISHED", "FAILED", "CANCELLED", "PREEMPTED", "LOST")
MIN_FREE_BYTES = 1 << 16  # a disk with less free space counts as full
SILENCE_SECONDS = 300.0  # a run on another host is LOST after at least twice this time without a sign of life
PREPARATION_SECONDS = 600.0  # maximum time that a process on another host may take to prepare a run folder


@dataclasses.dataclass(frozen=True)
class Status:
    """State, progress and speed of one run."""

    run: str
    state: str
    """PENDING, RUNNING, UNKNOWN, or one of FINAL_STATES."""
    attempts: int
    step: int
    """Last step of the run, or 0 before the first step."""
    total_steps: int | None
    """Number of steps of the whole run, or None if unknown."""
    seconds_left: float | None
    """Estimated time until the last step of an active run, or None if unknown."""
    loss: float | None
    """Loss of the last step, or None if unknown."""
    samples_per_second: float
    heartbeat: float | None
    """Seconds since the newest heartbeat of any rank, or None if there is no heartbeat."""
    detail: str = ""
    """Short explanation of the state."""
    name: str = ""
    notes: str = ""
    archived: bool = False

    @property
    def restarts(self) -> int:
        return max(0, self.attempts - 1)

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL_STATES

    def to_dict(self) -> dict[str, Any]:
        """Return the status as a dict for the JSON output."""
        return dataclasses.asdict(self) | {"state": self.state.lower(), "restarts": self.restarts}


def read_final_speed(folder: RunFolder) -> float | None:
    """Return the samples per second in the result of a run.

    Returns None if the result does not contain this value or the run only measures.
    """
    result = results.parse_result(folder.result)
    speed = result.find_number("samples_per_second")
    if not speed or result.scores:
        return speed
    settings = selection.read_newest_settings(folder)
    # Results of older versions count the points of a measurement as samples.
    return speed if selection.trains_model(folder.experiment, settings) else None


def read_status(folder: RunFolder) -> Status:
    """Return the status of a run, as read from the run folder and from SLURM."""
    attempts = folder.list_attempts()
    beats = heartbeats.read_heartbeats(attempts[-1]) if attempts else []
    last_beat = max((beat.time for beat in beats), default=0.0)
    age = max(0.0, time.time() - last_beat) if last_beat else None

    state, detail = read_state(folder, timeout=STATUS_TIMEOUT)
    if state == "RUNNING":
        details = [detail]
        if attempts:
            details += describe_rank_changes(attempts[-1])[-1:]
        details += [heartbeats.describe_shards(beats), heartbeats.describe_slow_rank(beats)]
        detail = "; ".join(filter(None, details))

    progress = read_training_progress(folder, read_final_speed(folder), is_finished=state == "FINISHED")
    settings = selection.read_newest_settings(folder)
    return Status(
        folder.path.name,
        state,
        len(attempts),
        progress.step,
        progress.total_steps,
        progress.seconds_left if state == "RUNNING" else None,
        progress.loss,
        progress.samples_per_second,
        age,
        detail,
        name=description.make_printable(settings.get("run.name", "")),
        notes=description.read_notes(folder, settings.get("run.notes", "")),
        archived=description.is_archived(folder),
    )


def read_state(folder: RunFolder, timeout: float = COMMAND_TIMEOUT) -> tuple[str, str]:
    """Return the state of a run and a short explanation of the state.

    Each SLURM command may take up to `timeout` seconds.
    """
    state, detail, _ = read_state_and_cause(folder, timeout)
    return state, detail


def read_state_and_cause(folder: RunFolder, timeout: float = COMMAND_TIMEOUT) -> tuple[str, str, Cause]:
    """Return the state of a run, a short explanation of the state, and the cause of a failure.

    The cause is that in result.json. Without a result, the cause is that of a full or read-only disk, or that of
    SLURM. Each SLURM command may take up to `timeout` seconds.
    """
    result = folder.result
    if result:
        return *read_final_state(result), results.read_cause(result)
    state, detail, cause = find_state_without_result(folder, timeout)
    if state in FINAL_STATES and (folder.path / "result.json").exists():
        result = folder.result
        if result:  # the run has ended while SLURM was queried
            return *read_final_state(result), results.read_cause(result)
        detail = f"result.json is damaged; {detail}"
    return state, detail, cause


def find_state_without_result(folder: RunFolder, timeout: float) -> tuple[str, str, Cause]:
    """Return the state of a run without a result, a short explanation, and the cause of a failure.

    Each SLURM command may take up to `timeout` seconds.
    """
    if submission.is_being_submitted(folder):
        return "PENDING", "being submitted", Cause.OTHER
    meta = provenance.read_metadata(folder)
    claim = claims.find_newest_claim(folder)
    if claim is not None and not claim.job and claim.check_process() is claims.ProcessState.ALIVE:
        return "RUNNING", "", Cause.OTHER
    if meta.get("job"):
        return find_state_of_job(folder, meta, timeout)
    return *find_state_of_local_run(folder, meta, claim), Cause.OTHER


def find_state_of_local_run(folder: RunFolder, meta: dict[str, Any], claim: claims.Claim | None) -> tuple[str, str]:
    """Return the state of a run without a result and without a job, and a short explanation."""
    # Attempts of older versions have no claim. Their process is recorded in the history in meta.json.
    process = claim.process if claim is not None else (meta.get("history") or [{}])[-1]
    if not process:
        return infer_state_of_unstarted_run(folder, meta.get("prepared_by") or {})
    is_alive = claims.is_process_alive(process)
    if is_alive is None:
        return infer_state_from_last_write(folder, process)
    return ("RUNNING", "") if is_alive else ("LOST", "process exited without writing result.json")


def find_state_of_job(folder: RunFolder, meta: dict[str, Any], timeout: float) -> tuple[str, str, Cause]:
    """Return the state of a run according to its SLURM job, a short explanation, and the cause of a failure."""
    scheduler = find_scheduler(meta)
    if scheduler is None:
        return "LOST", "the local cluster of the run is down", Cause.OTHER
    state, detail, cause = scheduler.read_job_state(meta["job"]["id"], timeout)
    if state == "FAILED":
        disk_cause = find_disk_problem(folder)
        if disk_cause is not None:
            problem = f"cannot write {folder.path}: {DISK_PROBLEMS[disk_cause]}"
            return state, f"{detail}; {problem}", disk_cause
    return state, detail, cause


def read_final_state(content: dict[str, Any]) -> tuple[str, str]:
    """Return the state in the content of result.json, and a short explanation.

    If the content does not contain a known state, the state is FAILED.
    """
    state = str(content.get("state")).upper()
    format_problem = results.describe_unknown_format(content)
    if state not in FINAL_STATES:
        return "FAILED", format_problem or "result.json does not contain a known state"
    result = results.parse_result(content)
    detail = str(content.get("reason") or "")
    for name, form in (("test_loss", "test loss {:.4g}"), ("test_accuracy", "accuracy {:.2%}")):
        score = result.find_number(name)
        detail = detail if score is None else form.format(score)
    return state, format_problem or detail


def infer_state_from_last_write(folder: RunFolder, process: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of a run whose process this host cannot see, and an explanation.

    The run is LOST if the ranks have not written a file for a long time. Otherwise, the run is RUNNING.
    """
    limit = 2 * max(SILENCE_SECONDS, selection.read_step_timeout(folder))
    last_write = max((attempt.find_last_write_time() for attempt in folder.list_attempts()[-1:]), default=0.0)
    age = time.time() - last_write
    if age < limit:
        return "RUNNING", ""
    problem = f"no sign of life for {format_duration(age)}"
    return "LOST", f"{problem}, and the process on {process.get('host')} is not visible from this host"


def infer_state_of_unstarted_run(folder: RunFolder, preparer: dict[str, Any]) -> tuple[str, str]:
    """Return the state of a run without an attempt or job, and a short explanation.

    `preparer` describes the process that created the run folder and that may still be preparing the folder.
    """
    is_preparing = claims.is_process_alive(preparer)
    if is_preparing is None:  # this host cannot check the process, so the age of config.yaml decides
        with contextlib.suppress(OSError):
            age = time.time() - (folder.path / "config.yaml").stat().st_mtime
            is_preparing = age < PREPARATION_SECONDS
    if is_preparing:
        return "PENDING", "being prepared"
    return "LOST", "created but never started; delete the folder"


def find_scheduler(meta: dict[str, Any]) -> Scheduler | None:
    """Return the SLURM cluster of a run's job.

    `meta` is the content of meta.json. Returns None if the job belongs to a local cluster that is down.
    """
    name = str(meta["job"]["scheduler"])
    if not name.startswith(LOCAL_CLUSTER_NAME):
        return Scheduler(name, required_cluster=meta["job"].get("cluster") or "")
    local_cluster = cluster.find_running_cluster(name.removeprefix(LOCAL_CLUSTER_NAME).strip() or cluster.DEFAULT_NAME)
    return Scheduler(name, local_cluster) if local_cluster else None


def find_disk_problem(folder: RunFolder) -> Cause | None:
    """Return why a job may have been unable to write its log: DISK_FULL or DISK_READ_ONLY.

    Returns None if the disk is writable and has free space.
    """
    try:
        disk = os.statvfs(folder.path)
    except OSError:
        return None
    if disk.f_flag & os.ST_RDONLY:
        return Cause.DISK_READ_ONLY
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES:
        return Cause.DISK_FULL
    return None
