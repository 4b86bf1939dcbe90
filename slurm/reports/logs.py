"""The `logs` command: print or follow the output of rank 0 of a run. This module does not import torch.

Messages of Submitit and srun that say nothing about the run are omitted, unless RAW=1.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
import signal
import time
from pathlib import Path

from common.runs import claims, provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError
from slurm.arguments import parse_zero_or_one
from slurm.reports.log_filter import LogFilter
from slurm.reports.selection import find_run, parse_float, read_newest_settings
from slurm.reports.status import FINAL_STATES, find_scheduler, read_status
from slurm.reports.status_table import format_status
from slurm.scheduling.scheduler import STATUS_TIMEOUT

EXIT_CODE = re.compile(r"(?:\bExitCode=|^)([0-9]+):([0-9]+)", re.MULTILINE)  # exit status:signal, from SLURM
POLL_SECONDS = 0.2
STATUS_SECONDS = 2.0  # interval between two reads of the run's status
MARGIN_SECONDS = 10.0  # the log of an ended run is followed for at most wandb.finish_timeout plus this time


def follow_log(folder: RunFolder, log: Path, *, raw: bool = False) -> int:
    """Print a log as it grows, until the run ends or the user presses Ctrl-C.

    Returns the exit status of the run, or 130 after Ctrl-C.
    """
    try:
        return print_growing_log(folder, log, raw)
    except KeyboardInterrupt:
        run = shlex.quote(str(folder.path))
        print(f"\nno longer following the log; the run continues. To stop the run: make cancel RUN={run}")
        return 128 + signal.SIGINT


def print_growing_log(folder: RunFolder, log: Path, raw: bool) -> int:
    """Print a log as it grows, without noise unless `raw`, and then the status of the run.

    A run writes its result before its last log lines. The log is therefore followed until the job or process has ended,
    but no longer than W&B may take to finish. Returns the exit status of the run.
    """
    finish_timeout = parse_float(read_newest_settings(folder).get("wandb.finish_timeout", "")) or 0.0
    max_result_age = MARGIN_SECONDS + finish_timeout
    log_filter = LogFilter()
    position = 0
    status_time = 0.0
    state = ""
    while True:
        # Check for the end of the run before reading, so that the last read contains the last log lines.
        is_last = state in FINAL_STATES and (
            measure_result_age(folder) > max_result_age or not is_still_writing(folder)
        )
        with contextlib.suppress(OSError), open(log, errors="replace") as file:
            file.seek(position)
            text = file.read()
            position = file.tell()
            print(text if raw else log_filter.select_lines(text, is_last=is_last), end="", flush=True)
        if is_last:
            break

        if state not in FINAL_STATES and time.monotonic() - status_time > STATUS_SECONDS:
            state = read_status(folder).state
            status_time = time.monotonic()
        time.sleep(POLL_SECONDS)
    print(format_status(read_status(folder)), flush=True)
    return find_exit_status(folder)


def measure_result_age(folder: RunFolder) -> float:
    """Return the seconds since a run wrote its result, or infinity without a result."""
    try:
        return time.time() - (folder.path / "result.json").stat().st_mtime
    except OSError:
        return math.inf


def is_still_writing(folder: RunFolder) -> bool:
    """Return whether the job or process of a run may still write to the log.

    A run that has already written its result may still be running.
    """
    meta = provenance.read_metadata(folder)
    if meta.get("job"):
        scheduler = find_scheduler(meta)
        return scheduler is not None and scheduler.read_job_state(meta["job"]["id"], STATUS_TIMEOUT)[0] == "RUNNING"
    return bool(claims.is_process_alive((meta.get("history") or [{}])[-1]))


def find_exit_status(folder: RunFolder) -> int:
    """Return the exit status of an ended run from its result or from SLURM.

    If SLURM reports that a signal ended the job, the exit status is 128 plus the signal number. Returns 1 if the run
    has no result and SLURM reports neither a nonzero exit status nor a signal.
    """
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
            match = EXIT_CODE.search(scheduler.run_command(*command))
            if match:
                code, signal_number = map(int, match.groups())
                return code or (128 + signal_number if 0 < signal_number < 32 else 1)
    return 1


def find_rank_0_log(folder: RunFolder) -> Path:
    """Return the path of rank 0's log.

    The log belongs to the job of the run or, if the run has no job, to the newest attempt. Raises UserError if the run
    has neither a job nor an attempt.
    """
    job = provenance.read_metadata(folder).get("job")
    if job:
        return Path(job.get("logs") or folder.path / "submit") / f"{job['id']}_0_log.out"
    attempts = folder.list_attempts()
    if not attempts:
        raise UserError(f"{folder.path.name} has no log yet")
    return attempts[-1].log_file(0)


def read_rank_0_log(folder: RunFolder) -> str:
    """Return the output of rank 0 from the newest attempt with output.

    Raises UserError if no attempt has output.
    """
    logs = [find_rank_0_log(folder)]
    logs += [attempt.log_file(0) for attempt in reversed(folder.list_attempts())]
    for log in logs:
        text = log.read_text(errors="replace") if log.exists() else ""
        if text:
            return text
    raise UserError(f"{folder.path.name} has no output yet; try again later, or wait for output with FOLLOW=1")


def main(args: argparse.Namespace) -> int:
    """Print or follow the log of rank 0, and return the exit status."""
    folder = find_run(args.run, Path(args.runs_folder or "runs"))
    raw = parse_zero_or_one("RAW", args.raw)
    if parse_zero_or_one("FOLLOW", args.follow):
        return follow_log(folder, find_rank_0_log(folder), raw=raw)
    text = read_rank_0_log(folder)
    print(text if raw else LogFilter().select_lines(text, is_last=True), end="")
    return 0
