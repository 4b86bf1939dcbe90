"""The `status` command: print a table of runs once, or until the runs have ended. This module does not import torch."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from common.runs import description
from common.runs.folder import RunFolder
from common.system.errors import UserError
from common.system.text import format_count, format_duration
from slurm.arguments import parse_zero_or_one
from slurm.reports import selection
from slurm.reports.status import Status, read_status
from slurm.reports.status_cache import StatusCache

MAX_LISTED_RUNS = 20  # maximum number of runs listed without ALL=1
FOLLOW_SECONDS = 1.0  # interval between two reads of the runs with FOLLOW=1
LINE_SECONDS = 10.0  # minimum time between two lines about the progress of a run if the output is not a terminal
RUN_NAME = re.compile(r"[a-z][a-z0-9_]*-\d{8}-\d{6}-[0-9a-f]{4}")  # format of the names from RunFolder.create
LINE = "{:<44}  {:<9}  {:>13}  {:>7}  {:>8}  {:>9}  {:>11}  {}"
HEAD = LINE.format("run", "state", "step", "left", "loss", "samples/s", "heartbeat", "").rstrip()


def format_status(status: Status) -> str:
    """Return the status of a run as a line of the table."""
    step = f"{status.step}" if status.total_steps is None else f"{status.step}/{status.total_steps}"
    left = "-" if status.seconds_left is None else format_duration(status.seconds_left)
    loss = "-" if status.loss is None else f"{status.loss:.4g}"
    speed = f"{status.samples_per_second:.0f}" if status.samples_per_second else "-"
    age = "-" if status.heartbeat is None else f"{format_duration(status.heartbeat)} ago"
    details = [f"[{status.name}]" if status.name else "", status.detail]
    if status.restarts:
        details.append(f"({format_count(status.restarts, 'restart')})")
    if status.archived:
        details.append("(archived)")
    text = " ".join(filter(None, details))
    return LINE.format(status.run, status.state, step, left, loss, speed, age, text).rstrip()


def print_statuses(statuses: Iterable[Status], as_json: bool) -> None:
    """Print the status of runs as a table or as JSON."""
    if as_json:
        print(json.dumps([status.to_dict() for status in statuses], indent=2))
        return
    print(HEAD)
    for status in statuses:
        print(format_status(status))


def choose_listed_runs(folders: list[RunFolder], lists_all: bool) -> list[RunFolder]:
    """Return the runs to list, newest first: all runs, or at most MAX_LISTED_RUNS runs that are not archived.

    `folders` contains all runs, oldest first.
    """
    if lists_all:
        return folders[::-1]
    active = (folder for folder in reversed(folders) if not description.is_archived(folder))
    return list(itertools.islice(active, MAX_LISTED_RUNS))


def print_newest_runs(runs: Path, lists_all: bool, as_json: bool) -> None:
    """Print the status of the newest runs, or of all runs if `lists_all` is true.

    Also prints how many runs are not listed, and warns about run folders that contain no config.yaml.
    """
    folders = selection.list_all_runs(runs)
    listed_runs = choose_listed_runs(folders, lists_all)
    cache = StatusCache(runs)
    cache.forget_other_runs(folders)
    print_statuses(map(cache.read_status, listed_runs), as_json)
    cache.save()
    if not lists_all:
        print_unlisted_count(folders, len(listed_runs))
    warn_about_unlisted_folders(runs, folders)


def print_unlisted_count(folders: list[RunFolder], listed_count: int) -> None:
    """Print how many older runs and how many archived runs are not listed, if any. `folders` contains all runs."""
    archived_count = sum(map(description.is_archived, folders))
    older_count = len(folders) - archived_count - listed_count
    counts = []
    if older_count:
        counts.append(format_count(older_count, "older run"))
    if archived_count:
        counts.append(format_count(archived_count, "archived run"))
    if counts:
        print(f"not listed: {', '.join(counts)}; to list all runs: make status ALL=1")


def warn_about_unlisted_folders(runs: Path, folders: list[RunFolder]) -> None:
    """Print to stderr the names of run folders that contain no config.yaml. `folders` contains the other runs."""
    other_names = set(selection.list_entries(runs)) - {folder.path.name for folder in folders}
    names = [name for name in sorted(other_names) if RUN_NAME.fullmatch(name) and (runs / name).is_dir()]
    if names:
        print(f"not listed because config.yaml is missing: {', '.join(names)}", file=sys.stderr)


def print_run(folder: RunFolder, seconds: float, as_json: bool) -> Status:
    """Print the status and the notes of a run, after waiting up to `seconds` seconds for the run to end."""
    status = wait_for_run_end(folder, seconds)
    print_statuses([status], as_json)
    if status.notes and not as_json:
        print(f"notes: {status.notes}")
    return status


def wait_for_run_end(folder: RunFolder, seconds: float) -> Status:
    """Wait up to `seconds` seconds for a run to end, and return its status."""
    deadline = time.monotonic() + seconds
    status = read_status(folder)
    while not status.has_ended and time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        status = read_status(folder)
    return status


# ---- FOLLOW=1


class Display(Protocol):
    """Output that shows the newest status of several runs."""

    def show(self, statuses: Sequence[Status]) -> None: ...

    def close(self) -> None: ...


class TerminalTable:
    """A table in the terminal that is refreshed in place."""

    def __init__(self) -> None:
        from rich.live import Live  # imported here because other uses of this command do not need it

        self.live = Live(auto_refresh=False)
        self.live.start()

    def show(self, statuses: Sequence[Status]) -> None:
        from rich.text import Text

        lines = [HEAD, *map(format_status, statuses)]
        self.live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        self.live.stop()


class StatusLines:
    """Lines for a file or a pipe: one line when the state of a run changes, and some lines about its progress."""

    def __init__(self) -> None:
        print(HEAD, flush=True)
        self.shown: dict[str, tuple[str, int, float]] = {}
        """State, step and time of the last line of each run."""

    def show(self, statuses: Sequence[Status]) -> None:
        now = time.monotonic()
        for status in statuses:
            state, step, shown_at = self.shown.get(status.run, ("", 0, 0.0))
            has_progress = status.step != step and now - shown_at >= LINE_SECONDS
            if status.state != state or has_progress:
                print(format_status(status), flush=True)
                self.shown[status.run] = (status.state, status.step, now)

    def close(self) -> None:
        """Do nothing, because all lines have been printed."""


def follow_runs(list_runs: Callable[[], list[RunFolder]]) -> int:
    """Show the status of runs until all of them have ended or the user presses Ctrl-C.

    `list_runs` returns the runs to show, which may change. Returns the exit status of the command.
    """
    display: Display = TerminalTable() if sys.stdout.isatty() else StatusLines()
    try:
        while True:
            statuses = [read_status(folder) for folder in list_runs()]
            display.show(statuses)
            if all(status.has_ended for status in statuses):
                return 0
            time.sleep(FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        display.close()


def main(args: argparse.Namespace) -> int:
    """Print the status of the newest runs or one run, and return the exit status.

    Raises UserError for invalid arguments.
    """
    runs = Path(args.runs_folder or "runs")
    as_json = parse_zero_or_one("JSON", args.json)
    lists_all = parse_zero_or_one("ALL", args.all) or as_json
    follow = parse_zero_or_one("FOLLOW", args.follow)
    if args.wait and not args.run:
        raise UserError("WAIT requires RUN=<id>, the id of the run to wait for")
    if args.all and args.run:
        raise UserError("ALL cannot be combined with RUN; omit one of them")
    if follow and (as_json or args.wait):
        raise UserError(f"FOLLOW cannot be combined with {'JSON' if as_json else 'WAIT'}; omit one of them")
    if not args.run:
        if follow:
            return follow_runs(lambda: choose_listed_runs(selection.list_all_runs(runs), lists_all))
        print_newest_runs(runs, lists_all, as_json)
        return 0
    folder = selection.find_run(args.run, runs)
    if follow:
        return follow_runs(lambda: [folder])
    seconds = args.wait or "0"
    if not re.fullmatch("[0-9]{1,9}", seconds):
        raise UserError(f"WAIT must be a whole number of seconds (got {args.wait!r})")
    status = print_run(folder, float(seconds), as_json)
    # Scripts need the exit status. Without WAIT or JSON, a nonzero status only makes `make` print a useless `Error 1`.
    is_script = bool(args.wait) or as_json
    return 1 if is_script and status.state in ("FAILED", "LOST") else 0
