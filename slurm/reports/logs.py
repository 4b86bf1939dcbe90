"""The verb `logs`: the output of rank 0 of a run, once or as it grows. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
import signal
import time
from pathlib import Path

from common.core.errors import UserError
from common.runs import claims, provenance
from common.runs.folder import RunFolder
from slurm.arguments import parse_switch
from slurm.reports.selection import find_run, parse_float, read_settings
from slurm.reports.status import FINAL_STATES, find_scheduler, read_status
from slurm.scheduling.scheduler import STATUS_TIMEOUT

EXIT_CODE = re.compile(r"(?:\bExitCode=|^)([0-9]+):([0-9]+)", re.MULTILINE)  # status:signal, of scontrol or sacct
POLL_SECONDS = 0.2
STATUS_SECONDS = 2.0  # between two reads of the run's status
MARGIN_SECONDS = 10.0  # a run that is over is followed for wandb.finish_timeout and this time


def follow_log(folder: RunFolder, log: Path) -> int:
    """Print a log as it grows until the run is over; returns the run's exit status."""
    try:
        return print_growing_log(folder, log)
    except KeyboardInterrupt:
        run = shlex.quote(str(folder.path))
        print(f"\nno longer following; the run continues. To stop it: make cancel RUN={run}")
        return 128 + signal.SIGINT


def print_growing_log(folder: RunFolder, log: Path) -> int:
    """Print a log as it grows, and at the end the status; returns the run's exit status.

    A run writes its result before its last lines. The log is therefore followed until the job or process has ended, but
    no longer than W&B may take to finish.
    """
    finish_timeout = parse_float(read_settings(folder).get("wandb.finish_timeout", "")) or 0.0
    max_result_age = MARGIN_SECONDS + finish_timeout
    position = 0
    status_time = 0.0
    state = ""
    while True:
        is_last = state in FINAL_STATES and (
            measure_result_age(folder) > max_result_age or not is_still_writing(folder)
        )
        with contextlib.suppress(OSError), open(log, errors="replace") as file:
            file.seek(position)
            text = file.read()
            position = file.tell()
            print(text, end="", flush=True)
        if is_last:
            break
        if state not in FINAL_STATES and time.monotonic() - status_time > STATUS_SECONDS:
            state = read_status(folder).state
            status_time = time.monotonic()
        time.sleep(POLL_SECONDS)
    print(read_status(folder).format_line(), flush=True)
    return find_exit_status(folder)


def measure_result_age(folder: RunFolder) -> float:
    """Return the seconds since a run wrote its result; infinity without a result."""
    try:
        return time.time() - (folder.path / "result.json").stat().st_mtime
    except OSError:
        return math.inf


def is_still_writing(folder: RunFolder) -> bool:
    """Check whether the job or process of a run that is over can still write."""
    meta = provenance.read_metadata(folder)
    if meta.get("job"):
        scheduler = find_scheduler(meta)
        return scheduler is not None and scheduler.read_job_state(meta["job"]["id"], STATUS_TIMEOUT)[0] == "RUNNING"
    return bool(claims.is_process_alive((meta.get("history") or [{}])[-1]))


def find_exit_status(folder: RunFolder) -> int:
    """Find the exit status of a run that is over: from its result, else from SLURM, else 1."""
    exit_status = folder.result.get("exit_status")
    if isinstance(exit_status, int):
        return exit_status
    meta = provenance.read_metadata(folder)
    scheduler = find_scheduler(meta) if meta.get("job") else None
    if scheduler is None:
        return 1
    job = meta["job"]["id"]
    for command in (("scontrol", "-o", "show", "job", job), ("sacct", "-n", "-X", "-P", "-j", job, "-o", "ExitCode")):
        with contextlib.suppress(UserError):
            match = EXIT_CODE.search(scheduler.call(*command))
            if match:
                code, signal_number = map(int, match.groups())
                return code or (128 + signal_number if 0 < signal_number < 32 else 1)
    return 1


def find_rank_0_log(folder: RunFolder) -> Path:
    """Find the file with the output of rank 0: of its job, or of its newest attempt. Raises UserError."""
    job = provenance.read_metadata(folder).get("job")
    if job:
        return Path(job.get("logs") or folder.path / "submit") / f"{job['id']}_0_log.out"
    attempts = folder.list_attempts()
    if not attempts:
        raise UserError(f"{folder.path.name} has no log yet")
    return attempts[-1].log_file(0)


def read_rank_0_log(folder: RunFolder) -> str:
    """Read the output of rank 0 in the newest attempt that has any. Raises UserError."""
    logs = [find_rank_0_log(folder)]
    logs += [attempt.log_file(0) for attempt in reversed(folder.list_attempts())]
    for log in logs:
        text = log.read_text(errors="replace") if log.exists() else ""
        if text:
            return text
    raise UserError(f"{folder.path.name} has no output yet; try again, or wait for it with FOLLOW=1")


def main(args: argparse.Namespace) -> int:
    """Print or follow the log of rank 0; returns the exit status."""
    folder = find_run(args.run, Path(args.runs_folder or "runs"))
    if parse_switch("FOLLOW", args.follow):
        return follow_log(folder, find_rank_0_log(folder))
    print(read_rank_0_log(folder), end="")
    return 0
