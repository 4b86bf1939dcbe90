"""The verb `status`: the state, progress and speed of runs. Imports no torch.

The state is taken from the result file and the heartbeats, then from squeue and scontrol, then from sacct. A site
without accounting loses nothing; a run that none of them knows any more is LOST.
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

from common.core.errors import UserError
from common.core.text import format_count, format_duration
from common.distributed.elastic.generations import describe_generations
from common.runs import claims, provenance
from common.runs import result as results
from common.runs.folder import Folder
from slurm.arguments import parse_switch
from slurm.local_cluster import cluster
from slurm.reports import heartbeats, selection
from slurm.scheduling import submission
from slurm.scheduling.scheduler import LOCAL, PATIENCE, QUICK, Scheduler

OVER = ("FINISHED", "FAILED", "CANCELLED", "PREEMPTED", "LOST")
TAIL, LAST_ROW = 1 << 16, 1 << 11  # bytes of metrics that tell the speed, and the step alone
LEAST = 1 << 16  # bytes free on a disk that is not full
SILENT = 300.0  # seconds without a sign of life, at least, of a run on another host that is lost
PREPARING = 600.0  # seconds for which a folder may be prepared by somebody who is not known here
RUN_NAME = re.compile(r"[a-z][a-z0-9_]*-\d{8}-\d{6}-[0-9a-f]{4}")  # as Folder.create makes it
LINE = "{:<44}  {:<9}  {:>8}  {:>7}  {:>9}  {:>11}  {}"
NEWEST = 20  # runs that are listed without ALL=1


@dataclasses.dataclass(frozen=True)
class Status:
    """One run as far as it is known."""

    run: str
    state: str
    attempts: int
    step: int
    samples_per_second: float
    heartbeat: float | None
    """Seconds since the newest sign of life of any rank."""
    detail: str = ""

    @property
    def restarts(self) -> int:
        return max(0, self.attempts - 1)

    def format_line(self) -> str:
        """Format the run's line of the table."""
        age = "-" if self.heartbeat is None else f"{format_duration(self.heartbeat)} ago"
        speed = f"{self.samples_per_second:.0f}" if self.samples_per_second else "-"
        return LINE.format(self.run, self.state, self.restarts, self.step, speed, age, self.detail).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return all values, for programs."""
        return dataclasses.asdict(self) | {"state": self.state.lower(), "restarts": self.restarts}


def read_last_rows(path: Path, size: int) -> list[dict[str, Any]]:
    """Read the last rows of a metrics file, without reading all of it."""
    rows = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("global_step"), int)]


def measure_speed(rows: list[dict[str, Any]]) -> float:
    """Return samples per second over the last training rows."""
    steps = [row for row in rows if "loss" in row][-50:]
    if len(steps) < 2 or steps[-1]["time"] <= steps[0]["time"]:
        return 0.0
    return float((steps[-1]["samples"] - steps[0]["samples"]) / (steps[-1]["time"] - steps[0]["time"]))


def list_counted_attempts(folder: Folder) -> list[Folder]:
    """List the newest attempt that has begun to train; empty where none has."""
    return [attempt for attempt, _ in folder.trace_attempts()[:1]]


def find_last_step(counted: list[Folder], rows: list[dict[str, Any]]) -> int:
    """Return the last step in `rows`, or else the steps of earlier attempts; 0 before the first step."""
    begun = [attempt.parent_record[1] for attempt in counted if attempt.parent_record]
    return max([row["global_step"] for row in rows] + begun, default=0)


def read_last_step(folder: Folder) -> int:
    """Read the last step of a run from its metrics, which have every step, unlike the heartbeats."""
    counted = list_counted_attempts(folder)
    rows = read_last_rows(counted[0].metrics_file, LAST_ROW) if counted else []
    return find_last_step(counted, rows)


def read_final_rate(folder: Folder) -> float | None:
    """Read the samples/s of a finished run; None without a result, and for a run that only measures."""
    result = results.parse_result(folder.result)
    rate = result.find_number("samples_per_second")
    if rate and not result.scores and not selection.trains_model(selection.read_settings(folder)):
        return None  # older versions counted the points of a measurement as samples
    return rate


def read_status(folder: Folder) -> Status:
    """Read the status of a run from its folder and from SLURM."""
    attempts = folder.attempts()
    newest = attempts[-1] if attempts else None
    counted = list_counted_attempts(folder)
    rate = read_final_rate(folder)
    rows = read_last_rows(counted[0].metrics_file, LAST_ROW if rate else TAIL) if counted else []
    signs = heartbeats.read_heartbeats(newest) if newest else []
    beat = max((sign.time for sign in signs), default=0.0)
    age = max(0.0, time.time() - beat) if beat else None
    step = find_last_step(counted, rows)
    state, detail = read_state(folder, patience=QUICK)
    if state == "RUNNING":
        changed = describe_generations(newest)[-1:] if newest else []
        words = (detail, *changed, heartbeats.describe_shards(signs), heartbeats.describe_slow_rank(signs))
        detail = "; ".join(filter(None, words))
    speed = rate or measure_speed(rows)
    if not speed and state == "FINISHED":  # the newest attempt had too few steps left
        earlier = [read_last_rows(attempt.metrics_file, TAIL) for attempt, _ in folder.trace_attempts()[1:2]]
        speed = sum(map(measure_speed, earlier))
    return Status(folder.path.name, state, len(attempts), step, speed, age, detail)


def read_state(folder: Folder, patience: float = PATIENCE) -> tuple[str, str]:
    """Read the state of a run and a few words on it; each command of SLURM has `patience` seconds to answer."""
    result = folder.result
    if result:
        return read_ending(result)
    state, detail = find_state_without_result(folder, patience)
    if state in OVER and (folder.path / "result.json").exists():
        detail = f"result.json is damaged; {detail}"
    return state, detail


def find_state_without_result(folder: Folder, patience: float) -> tuple[str, str]:
    """Find the state of a run without a result, and a few words on it."""
    if submission.is_being_submitted(folder):
        return "PENDING", "it is being submitted"
    meta = provenance.read_metadata(folder)
    claim = claims.find_newest_claim(folder)
    if claim is not None and not claim.job and claim.judge() is claims.Life.ALIVE:
        return "RUNNING", ""
    if meta.get("job"):
        return find_state_of_job(folder, meta, patience)
    start = claim.process if claim is not None else (meta.get("history") or [{}])[-1]
    if not start:
        return judge_unstarted(folder, meta.get("prepared_by") or {})
    runs = claims.is_process_alive(start)
    if runs is None:
        return judge_by_signs_of_life(folder, start)
    return ("RUNNING", "") if runs else ("LOST", "its process is gone and left no result")


def find_state_of_job(folder: Folder, meta: dict[str, Any], patience: float) -> tuple[str, str]:
    """Find the state of a run by its job, and a few words on it."""
    scheduler = find_scheduler(meta)
    if scheduler is None:
        return "LOST", "the local cluster that it was given to is down"
    state, word = scheduler.read_job_state(meta["job"]["id"], patience)
    return state, word + (find_disk_fault(folder) if state == "FAILED" else "")


def read_ending(result: dict[str, Any]) -> tuple[str, str]:
    """Read the state of a run from its result; one without a known state counts as failed."""
    state, accuracy = str(result.get("state")).upper(), results.parse_result(result).find_number("test_accuracy")
    unknown = results.describe_unknown_format(result)
    if state not in OVER:
        return "FAILED", unknown or "result.json does not say how it ended"
    return state, unknown or (str(result.get("reason") or "") if accuracy is None else f"accuracy {accuracy:.2%}")


def judge_by_signs_of_life(folder: Folder, start: Mapping[str, Any]) -> tuple[str, str]:
    """Judge a run without a result whose process cannot be seen from here, by its newest sign of life."""
    allowed = 2 * max(SILENT, selection.read_step_timeout(folder))
    last_write = max((attempt.find_last_write() for attempt in folder.attempts()[-1:]), default=0.0)
    age = time.time() - last_write
    if age < allowed:
        return "RUNNING", ""
    unseen = f"its process on {start.get('host')} cannot be seen from here"
    return "LOST", f"no sign of life for {format_duration(age)}, and {unseen}"


def judge_unstarted(folder: Folder, by: dict[str, Any]) -> tuple[str, str]:
    """Judge a folder without attempt and job: another process may still be preparing it."""
    is_busy = claims.is_process_alive(by)
    if is_busy is None:
        with contextlib.suppress(OSError):
            is_busy = time.time() - (folder.path / "config.yaml").stat().st_mtime < PREPARING
    if is_busy:
        return "PENDING", "it is being prepared"
    return "LOST", "it was prepared and never begun; remove its folder"


def find_scheduler(meta: dict[str, Any]) -> Scheduler | None:
    """Return the SLURM that a run was given to; None for a local cluster that is down."""
    scheduler = str(meta["job"]["scheduler"])
    if not scheduler.startswith(LOCAL):
        return Scheduler(scheduler)
    own = cluster.find_running_cluster(scheduler.removeprefix(LOCAL).strip() or cluster.DEFAULT)
    return Scheduler(scheduler, own) if own else None


def find_disk_fault(folder: Folder) -> str:
    """Find why the run folder's disk may have kept a job from writing its log; empty where the disk is sound."""
    try:
        disk = os.statvfs(folder.path)
    except OSError:
        return ""
    if disk.f_flag & os.ST_RDONLY:
        return f"; cannot write {folder.path}: the disk is read-only; choose another folder"
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < LEAST:
        return f"; cannot write {folder.path}: the disk is full; free space"
    return ""


def wait_for_run_end(folder: Folder, seconds: float) -> Status:
    """Return the status once the run is over, or after so many seconds."""
    deadline = time.monotonic() + seconds
    status = read_status(folder)
    while status.state not in OVER and time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        status = read_status(folder)
    return status


def print_statuses(found: Iterable[Status], as_json: bool) -> None:
    """Print runs as a table, or as JSON."""
    if as_json:
        print(json.dumps([status.to_dict() for status in found], indent=2))
        return
    print(LINE.format("run", "state", "restarts", "step", "samples/s", "heartbeat", "").rstrip())
    for status in found:
        print(status.format_line())


def report_unlisted_folders(runs: Path) -> None:
    """Print, on stderr, the folders that look like runs and have no config.yaml."""
    names = [path.name for path in sorted(runs.glob("*")) if RUN_NAME.fullmatch(path.name) and path.is_dir()]
    names = [name for name in names if not (runs / name / "config.yaml").exists()]
    if names:
        print(f"not listed, without config.yaml: {', '.join(names)}", file=sys.stderr)


def main(given: argparse.Namespace) -> int:
    """Print the status of the newest runs, or of one; returns the exit status. Raises UserError."""
    runs, as_json = Path(given.runs_folder or "runs"), parse_switch("JSON", given.json)
    lists_all = parse_switch("ALL", given.all) or as_json
    if given.wait and not given.run:
        raise UserError("WAIT needs RUN=<id>, the run whose end is waited for")
    if given.all and given.run:
        raise UserError("ALL lists all runs; leave it or RUN out")
    if not given.run:
        folders = selection.list_runs(runs)[::-1]
        chosen = folders if lists_all else folders[:NEWEST]
        print_statuses(map(read_status, chosen), as_json)
        if len(chosen) < len(folders):
            print(f"not listed: {format_count(len(folders) - len(chosen), 'older run')}; make status ALL=1 lists them")
        report_unlisted_folders(runs)
        return 0
    folder = selection.find_run(given.run, runs)
    if not (given.wait or "0").isdigit():
        raise UserError(f"WAIT={given.wait!r} is no number of seconds")
    status = wait_for_run_end(folder, float(given.wait or "0"))
    print_statuses([status], as_json)
    is_script = bool(given.wait) or as_json  # others have read the state, and make would print its `Error 1` below it
    return 1 if is_script and status.state in ("FAILED", "LOST") else 0
