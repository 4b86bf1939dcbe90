"""How runs are doing: `make status`, `make logs`, `make cancel`. Imports no torch.

    python -m slurm.reports.status status [RUN] [--wait=SECONDS] [--json=1]
    python -m slurm.reports.status logs RUN [--follow=1]
    python -m slurm.reports.status cancel RUN

The truth is asked in this order: the result file and the heartbeats, then squeue and scontrol, then
sacct. A site without accounting loses nothing; a run that none of them knows any more is LOST.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.core import config
from common.core.errors import UserError, user_errors
from common.runs import provenance
from common.runs import result as results
from common.runs.folder import Folder, read_json, write_json
from slurm.arguments import parse_switch
from slurm.local_cluster import cluster
from slurm.local_cluster.namespaces import Process
from slurm.reports import heartbeats
from slurm.scheduling.scheduler import LOCAL, PATIENCE, QUICK, Scheduler

OVER = ("FINISHED", "FAILED", "CANCELLED", "PREEMPTED", "LOST")
TAIL, LAST_ROW = 1 << 16, 1 << 11  # bytes of metrics that tell the speed, and the step alone
LEAST = 1 << 16  # bytes free on a disk that is not full
SILENT = 300.0  # seconds without a sign of life, at least, of a run on another host that is lost
PREPARING = 600.0  # seconds for which a folder may be prepared by somebody who is not known here
EXIT_CODE = re.compile(r"(?:\bExitCode=|^)([0-9]+):([0-9]+)", re.MULTILINE)  # status:signal, of scontrol or sacct


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

    def line(self) -> str:
        age = "-" if self.heartbeat is None else f"{self.heartbeat:.0f} s ago"
        restarts = max(0, self.attempts - 1)
        numbers = f"{restarts:>8}  {self.step:>7}  {self.samples_per_second:>9.0f}  {age:>11}"
        return f"{self.run:<44}  {self.state:<9}  {numbers}  {self.detail}".rstrip()

    def facts(self) -> dict[str, Any]:
        """For machines."""
        return dataclasses.asdict(self) | {"state": self.state.lower(), "restarts": max(0, self.attempts - 1)}


HEAD = f"{'run':<44}  {'state':<9}  {'restarts':>8}  {'step':>7}  {'samples/s':>9}  {'heartbeat':>11}"


def find(name: str, runs: Path) -> Folder:
    """The run folder of an id, its last four characters, or a path. Raises UserError."""
    ends = [file.parent for file in runs.glob(f"*-{name}/config.yaml")] if re.fullmatch("[0-9a-f]{4}", name) else []
    if len(ends) > 1:
        raise UserError(f"{name} is the end of {' and '.join(sorted(path.name for path in ends))}; write one out")
    for path in (Path(name), runs / name, *ends):
        if name and os.path.isfile(path / "config.yaml"):  # noqa: PTH113 (is_file raises where a name is too long)
            return Folder(path.absolute())
    if not name:
        newest = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)[:3]
        names = ", ".join(path.parent.name for path in newest) or "none"
        raise UserError(f"RUN is missing; write RUN=<id> (newest in {runs}: {names})")
    raise UserError(f"{name!r}: no such run folder in {runs}; make status lists them")


def short(folder: Folder) -> str:
    """What to write for RUN=: the id, or the path of a run that is not in runs/."""
    return folder.path.name if folder.path.parent == Path("runs").absolute() else str(folder.path)


def tail(path: Path, size: int) -> list[dict[str, Any]]:
    """The last rows of a metrics file, without reading all of it."""
    rows = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("global_step"), int)]


def speed(rows: list[dict[str, Any]]) -> float:
    """Samples a second over the last training rows."""
    steps = [row for row in rows if "loss" in row][-50:]
    if len(steps) < 2 or steps[-1]["time"] <= steps[0]["time"]:
        return 0.0
    return float((steps[-1]["samples"] - steps[0]["samples"]) / (steps[-1]["time"] - steps[0]["time"]))


def status_of(folder: Folder) -> Status:
    """Everything that can be found out about a run."""
    attempts = folder.attempts()
    newest = attempts[-1] if attempts else None
    counted = [attempt for attempt, _ in folder.chain()[:1]]  # the newest that has begun to train
    rate = results.parse(folder.result).number("samples_per_second")
    rows = tail(counted[0].metrics_file, LAST_ROW if rate else TAIL) if counted else []
    signs = heartbeats.beats(newest) if newest else []
    beat = max((sign.time for sign in signs), default=0.0)
    age = max(0.0, time.time() - beat) if beat else None
    begun = [attempt.origin[1] for attempt in counted if attempt.origin]  # steps of earlier starts
    step = max([row["global_step"] for row in rows] + begun, default=0)
    state, detail = state_of(folder, patience=QUICK)
    if state == "RUNNING":
        detail = "; ".join(filter(None, (detail, heartbeats.slow_words(signs))))
    return Status(folder.path.name, state, len(attempts), step, rate or speed(rows), age, detail)


def state_of(folder: Folder, patience: float = PATIENCE) -> tuple[str, str]:
    """The state of a run and a word on it; SLURM has so many seconds to answer."""
    result = folder.result
    if result:
        return ending(result)
    meta = read_json(folder.path / "meta.json")
    if meta.get("job"):
        scheduler = scheduler_of(meta)
        if scheduler is None:
            return "LOST", "the local cluster that it was given to is down"
        state, word = scheduler.state(meta["job"]["id"], patience)
        return state, word + (disk_trouble(folder) if state == "FAILED" else "")
    start = (meta.get("history") or [{}])[-1]
    if not start:
        return unbegun(folder, meta.get("prepared_by") or {})
    runs = alive(start)
    if runs is None:
        return judge_by_signs(folder, start)
    return ("RUNNING", "") if runs else ("LOST", "its process is gone and left no result")


def ending(result: dict[str, Any]) -> tuple[str, str]:
    """What a result file says; one that does not tell how the run ended is no success."""
    state, accuracy = str(result.get("state")).upper(), results.parse(result).number("test_accuracy")
    if state not in OVER:
        return "FAILED", "result.json does not say how it ended"
    return state, str(result.get("reason") or "") if accuracy is None else f"accuracy {accuracy:.2%}"


def alive(entry: dict[str, Any]) -> bool | None:
    """Whether a process that meta.json names still runs; None where this host cannot know."""
    runs = Process(entry.get("pid", 0), entry.get("pid_started", 0)).alive()
    if entry.get("host") == socket.gethostname():
        return runs
    # a host that was renamed meanwhile has the same kernel; but so has another container
    return True if runs and entry.get("boot") == provenance.read_boot_id() else None


def judge_by_signs(folder: Folder, start: dict[str, Any]) -> tuple[str, str]:
    """The state of a run without result whose process cannot be seen from here: by its newest sign of life."""
    allowed = 2 * max(SILENT, results.to_number(read_timeout(folder)) or 0.0)
    paths = [path for attempt in folder.attempts()[-1:] for path in attempt.attempt.rglob("*")]
    age = time.time() - max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
    if age < allowed:
        return "RUNNING", ""
    return "LOST", f"no sign of life for {age:.0f} s, and its process on {start.get('host')} cannot be seen from here"


def read_timeout(folder: Folder) -> float | None:
    """The run's launch.step_timeout in seconds, as far as its settings tell."""
    with contextlib.suppress(UserError, ValueError, TypeError):
        return float(config.read_config_file(folder.path / "config.yaml").get("launch.step_timeout", ""))
    return None


def unbegun(folder: Folder, by: dict[str, Any]) -> tuple[str, str]:
    """Of a folder in which no start has begun and that was given to no job: somebody may still be preparing it."""
    busy = alive(by)
    if busy is None:
        with contextlib.suppress(OSError):
            busy = time.time() - (folder.path / "config.yaml").stat().st_mtime < PREPARING
    if busy:
        return "PENDING", "it is being prepared"
    return "LOST", "it was prepared and never begun; remove its folder"


def scheduler_of(meta: dict[str, Any]) -> Scheduler | None:
    """The SLURM that a run was given to; None for a local cluster that is down."""
    if meta["job"]["scheduler"] != LOCAL:
        return Scheduler(meta["job"]["scheduler"])
    own = cluster.running()
    return Scheduler(LOCAL, own) if own else None


def disk_trouble(folder: Folder) -> str:
    """Why a job could say nothing in its log, if its disk can tell."""
    try:
        disk = os.statvfs(folder.path)
    except OSError:
        return ""
    if disk.f_flag & os.ST_RDONLY:
        return f"; cannot write {folder.path}: the disk is read-only; choose another folder"
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < LEAST:
        return f"; cannot write {folder.path}: the disk is full; free space"
    return ""


def wait(folder: Folder, seconds: float) -> Status:
    """The status once the run is over, or after so many seconds."""
    deadline = time.monotonic() + seconds
    status = status_of(folder)
    while status.state not in OVER and time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        status = status_of(folder)
    return status


def follow(folder: Folder, log: Path) -> int:
    """Show a log as it grows until the run is over; returns the run's exit status."""
    try:
        return follow_to_the_end(folder, log)
    except KeyboardInterrupt:
        run = shlex.quote(str(folder.path))
        print(f"\nno longer following; the run goes on, and is ended by: make cancel RUN={run}")
        return 128 + signal.SIGINT


def follow_to_the_end(folder: Folder, log: Path) -> int:
    position, looked, state = 0, 0.0, ""
    while True:
        with contextlib.suppress(OSError), open(log, errors="replace") as file:
            file.seek(position)
            text = file.read()
            position = file.tell()
            print(text, end="", flush=True)
        if state in OVER:
            break
        if time.monotonic() - looked > 2:
            state, looked = status_of(folder).state, time.monotonic()
        time.sleep(0.2)
    print(status_of(folder).line(), flush=True)
    return exit_status(folder)


def exit_status(folder: Folder) -> int:
    """The exit status of a run that is over: its own, else what SLURM saw, else 1."""
    meta, result = read_json(folder.path / "meta.json"), folder.result
    if isinstance(result.get("exit_status"), int):
        return int(result["exit_status"])
    scheduler = scheduler_of(meta) if meta.get("job") else None
    if scheduler is None:
        return 1
    job = meta["job"]["id"]
    for words in (("scontrol", "-o", "show", "job", job), ("sacct", "-n", "-X", "-P", "-j", job, "-o", "ExitCode")):
        with contextlib.suppress(UserError):
            found = EXIT_CODE.search(scheduler.call(*words))
            if found:
                code, signalled = int(found[1]), int(found[2])
                return code or (128 + signalled if 0 < signalled < 32 else 1)
    return 1


def rank_0_log(folder: Folder) -> Path:
    """What rank 0 said, on the screen of a job or in its log file."""
    job = read_json(folder.path / "meta.json").get("job")
    if job:
        return Path(job.get("logs") or folder.path / "submit") / f"{job['id']}_0_log.out"
    attempts = folder.attempts()
    if not attempts:
        raise UserError(f"{folder.path.name} has no log yet")
    return attempts[-1].log_file(0)


def what_rank_0_said(folder: Folder) -> str:
    """In the newest start of which there are words; a queued one has none yet. Raises UserError."""
    logs = [rank_0_log(folder), *(attempt.log_file(0) for attempt in reversed(folder.attempts()))]
    texts = [log.read_text(errors="replace") for log in logs if log.exists()]
    if not any(texts):
        raise UserError(f"{folder.path.name} has said nothing yet; try again, or FOLLOW=1")
    return next(filter(None, texts))


def cancel(folder: Folder) -> str:
    """End a run; returns what was done."""
    state, _ = state_of(folder)
    if state in OVER:
        return f"{folder.path.name} is {state} already"
    meta = read_json(folder.path / "meta.json")
    job, start = meta.get("job"), (meta.get("history") or [{}])[-1]
    if not job and not start:
        raise UserError(f"{folder.path.name} is still being prepared; end the command that does it, or try again")
    if not job and alive(start) is None:
        raise UserError(f"{folder.path.name} runs on {start['host']}; cancel it there")
    # first: so it is not queued again, and its process knows why it has to stop
    write_json(folder.path / "result.json", {"state": "cancelled", "exit_status": 130})
    if not job:
        os.kill(start["pid"], signal.SIGTERM)
        return f"cancelled process {start['pid']}; it saves, and leaves"
    scheduler = scheduler_of(meta)
    assert scheduler is not None, "it would be LOST"
    scheduler.call("scancel", job["id"])
    provenance.update_metadata(folder, state="cancelled", end=provenance.utc_now())
    return f"cancelled job {job['id']}"


def show(found: Iterable[Status], machines: bool) -> None:
    """The runs as a table, or as JSON."""
    if machines:
        print(json.dumps([status.facts() for status in found], indent=2))
        return
    print(HEAD)
    for status in found:
        print(status.line())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make status, make logs, make cancel")
    parser.add_argument("verb", choices=("status", "logs", "cancel"))
    parser.add_argument("run", nargs="?", default="")
    for option, default in (("wait", "0"), ("follow", ""), ("json", ""), ("runs", "runs")):
        parser.add_argument(f"--{option}", default=default)
    given = parser.parse_args(arguments)
    runs = Path(given.runs or "runs")
    if given.verb == "status" and not given.run:
        found = (status_of(Folder(path.parent.absolute())) for path in sorted(runs.glob("*/config.yaml")))
        show(found, parse_switch("JSON", given.json))
        return 0
    folder = find(given.run, runs)
    if given.verb == "cancel":
        print(cancel(folder))
    elif given.verb == "logs":
        if given.follow == "1":
            return follow(folder, rank_0_log(folder))
        print(what_rank_0_said(folder), end="")
    else:
        if not (given.wait or "0").isdigit():
            raise UserError(f"WAIT={given.wait!r} is no number of seconds")
        machines = parse_switch("JSON", given.json)
        status = wait(folder, float(given.wait or "0"))
        show([status], machines)
        return 1 if status.state in ("FAILED", "LOST") else 0
    return 0


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
