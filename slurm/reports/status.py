"""The `status` command: print the state, progress and speed of runs. This module does not import torch.

The state of a run is read from result.json, from the process that runs the newest attempt, or from SLURM (squeue,
scontrol and sacct). SLURM accounting is optional. A run is LOST if these sources show neither that the run is active
nor how the run ended.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.runs import claims, provenance
from common.runs import result as results
from common.runs.folder import RunFolder
from common.runs.rank_changes import describe_rank_changes
from common.system.causes import Cause
from common.system.disk_problems import DISK_PROBLEMS
from common.system.errors import UserError
from common.system.text import format_count, format_duration, read_end_of_file
from slurm.arguments import parse_zero_or_one
from slurm.local_cluster import cluster
from slurm.reports import heartbeats, selection
from slurm.scheduling import submission
from slurm.scheduling.scheduler import COMMAND_TIMEOUT, LOCAL_CLUSTER_NAME, STATUS_TIMEOUT, Scheduler

FINAL_STATES = ("FINISHED", "FAILED", "CANCELLED", "PREEMPTED", "LOST")
SPEED_BYTES = 1 << 16  # number of bytes read from the end of the metrics to measure the speed
LAST_ROW_BYTES = 1 << 11  # number of bytes read from the end of the metrics to find the last step
MIN_FREE_BYTES = 1 << 16  # a disk with less free space counts as full
SILENCE_SECONDS = 300.0  # a run on another host is LOST after at least twice this time without a sign of life
PREPARATION_SECONDS = 600.0  # maximum time that a process on another host may take to prepare a run folder
MAX_LISTED_RUNS = 20  # maximum number of runs listed without ALL=1
RUN_NAME = re.compile(r"[a-z][a-z0-9_]*-\d{8}-\d{6}-[0-9a-f]{4}")  # format of the names from RunFolder.create
LINE = "{:<44}  {:<9}  {:>8}  {:>7}  {:>9}  {:>11}  {}"  # format of a table row: run, state, restarts, step, ...


@dataclasses.dataclass(frozen=True)
class Status:
    """State, progress and speed of one run."""

    run: str
    state: str
    """PENDING, RUNNING, UNKNOWN, or one of FINAL_STATES."""
    attempts: int
    step: int
    """Last step of the run, or 0 before the first step."""
    samples_per_second: float
    heartbeat: float | None
    """Seconds since the newest heartbeat of any rank, or None if there is no heartbeat."""
    detail: str = ""
    """Short explanation of the state."""

    @property
    def restarts(self) -> int:
        return max(0, self.attempts - 1)

    def format_line(self) -> str:
        """Return the status as a line of the table that `make status` prints."""
        age = "-" if self.heartbeat is None else f"{format_duration(self.heartbeat)} ago"
        speed = f"{self.samples_per_second:.0f}" if self.samples_per_second else "-"
        return LINE.format(self.run, self.state, self.restarts, self.step, speed, age, self.detail).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return the status as a dict for the JSON output."""
        return dataclasses.asdict(self) | {"state": self.state.lower(), "restarts": self.restarts}


def list_trained_attempts(folder: RunFolder) -> list[RunFolder]:
    """Return the attempts whose training steps count toward the run, newest first."""
    return [attempt for attempt, _ in folder.trace_attempts()]


def read_last_metrics_rows(attempts: list[RunFolder], size: int) -> list[dict[str, Any]]:
    """Return the metric rows in the last `size` bytes of the first attempt's metrics.jsonl.

    Truncated and malformed rows are skipped. Returns an empty list if `attempts` is empty.
    """
    rows = []
    for attempt in attempts[:1]:
        for line in read_end_of_file(attempt.metrics_file, size).splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("global_step"), int)]


def measure_speed(rows: list[dict[str, Any]]) -> float:
    """Return the samples per second over the last 50 training rows.

    Returns 0 if there are fewer than two training rows.
    """
    steps = [row for row in rows if "loss" in row][-50:]
    if len(steps) < 2 or steps[-1]["time"] <= steps[0]["time"]:
        return 0.0
    samples = steps[-1]["samples"] - steps[0]["samples"]
    return float(samples / (steps[-1]["time"] - steps[0]["time"]))


def find_last_step(attempts: list[RunFolder], rows: list[dict[str, Any]]) -> int:
    """Return the last step of a run, or 0 before the first step.

    The last step is the highest step in `rows` or, if higher, the step from which the newest attempt resumed.
    """
    steps = [row["global_step"] for row in rows]
    steps += [attempt.parent_record[1] for attempt in attempts[:1] if attempt.parent_record]
    return max(steps, default=0)


def read_last_step(folder: RunFolder) -> int:
    """Return the last step in the metrics of a run.

    Heartbeats are not used, because the metrics may contain later steps than the newest heartbeats.
    """
    attempts = list_trained_attempts(folder)
    return find_last_step(attempts, read_last_metrics_rows(attempts, LAST_ROW_BYTES))


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

    trained = list_trained_attempts(folder)
    speed = read_final_speed(folder)
    # Finding the last step requires fewer rows than measuring the speed.
    rows = read_last_metrics_rows(trained, LAST_ROW_BYTES if speed else SPEED_BYTES)
    speed = speed or measure_speed(rows)
    if not speed and state == "FINISHED":  # the newest attempt had too few steps
        speed = measure_speed(read_last_metrics_rows(trained[1:], SPEED_BYTES))
    return Status(folder.path.name, state, len(attempts), find_last_step(trained, rows), speed, age, detail)


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
        return Scheduler(name)
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


def wait_for_run_end(folder: RunFolder, seconds: float) -> Status:
    """Wait up to `seconds` seconds for a run to end, and return its status."""
    deadline = time.monotonic() + seconds
    status = read_status(folder)
    while status.state not in FINAL_STATES and time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        status = read_status(folder)
    return status


def print_statuses(statuses: Iterable[Status], as_json: bool) -> None:
    """Print the status of runs as a table or as JSON."""
    if as_json:
        print(json.dumps([status.to_dict() for status in statuses], indent=2))
        return
    print(LINE.format("run", "state", "restarts", "step", "samples/s", "heartbeat", "").rstrip())
    for status in statuses:
        print(status.format_line())


def print_newest_runs(runs: Path, lists_all: bool, as_json: bool) -> None:
    """Print the status of the newest runs, or of all runs if `lists_all` is true.

    Also prints how many older runs are not listed, and warns about run folders that contain no config.yaml.
    """
    folders = selection.list_all_runs(runs)[::-1]
    selected = folders if lists_all else folders[:MAX_LISTED_RUNS]
    print_statuses(map(read_status, selected), as_json)
    if len(selected) < len(folders):
        count = format_count(len(folders) - len(selected), "older run")
        print(f"not listed: {count}; to list all runs: make status ALL=1")
    warn_about_unlisted_folders(runs)


def warn_about_unlisted_folders(runs: Path) -> None:
    """Print to stderr the names of run folders that contain no config.yaml."""
    folders = [path for path in sorted(runs.glob("*")) if RUN_NAME.fullmatch(path.name) and path.is_dir()]
    names = [path.name for path in folders if not (path / "config.yaml").exists()]
    if names:
        print(f"not listed because config.yaml is missing: {', '.join(names)}", file=sys.stderr)


def main(args: argparse.Namespace) -> int:
    """Print the status of the newest runs or one run, and return the exit status.

    Raises UserError for invalid arguments.
    """
    runs = Path(args.runs_folder or "runs")
    as_json = parse_zero_or_one("JSON", args.json)
    lists_all = parse_zero_or_one("ALL", args.all) or as_json
    if args.wait and not args.run:
        raise UserError("WAIT requires RUN=<id>, the id of the run to wait for")
    if args.all and args.run:
        raise UserError("ALL cannot be combined with RUN; omit one of them")
    if not args.run:
        print_newest_runs(runs, lists_all, as_json)
        return 0
    folder = selection.find_run(args.run, runs)
    seconds = args.wait or "0"
    if not seconds.isdigit():
        raise UserError(f"WAIT must be a whole number of seconds (got {args.wait!r})")
    status = wait_for_run_end(folder, float(seconds))
    print_statuses([status], as_json)
    # Scripts need the exit status. Without WAIT or JSON, a nonzero status only makes `make` print a useless `Error 1`.
    is_script = bool(args.wait) or as_json
    return 1 if is_script and status.state in ("FAILED", "LOST") else 0
