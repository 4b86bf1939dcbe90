"""The verb `sweep`: every point of a grid as a run of its own, an array of jobs on SLURM or one after the other here.

The runs of the points are listed in runs/sweeps/<file's name>/sweep.json: the same command again submits only what is
missing. A point that was cancelled or lost is resumed; a failed one is left alone, and with FAILED=1 started anew with
the source as it is now. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.core.errors import RunTaken, UserError
from common.core.text import format_count
from common.runs import provenance
from common.runs.folder import Folder, disk_errors, write_json
from configs.elastic import find_elastic
from configs.profile import Profile
from slurm.arguments import parse_switch, split_settings
from slurm.launch import submit, sweep_file
from slurm.launch.sweep_file import Grid, Point
from slurm.reports import liveness, selection, status
from slurm.scheduling import sbatch, submission
from slurm.scheduling.entry_points import CURRENT, find_entry_points
from slurm.scheduling.scheduler import Scheduler, choose_scheduler

GO_ON = ("CANCELLED", "PREEMPTED", "LOST")  # these go on where they were saved
PAUSE = 2.0  # seconds between two looks at all points


class Sweep:
    """The folder of a sweep, which lists the run of each point."""

    def __init__(self, path: Path, plan: Grid) -> None:
        self.path, self.plan, self.runs = path, plan, path.parent.parent
        self.shown_notices: set[str] = set()
        known = selection.read_sweep(path / "sweep.json")
        check_same_sweep(known, plan)
        cells = known.get("cells", [])
        self.cells = {sweep_file.make_point_key(cell["values"], cell.get("repeat", 0)): cell for cell in cells}

    def find_folder(self, point: Point) -> Folder | None:
        """Find the run folder of a point; None where it has none, or one that was never started."""
        run = self.cells.get(point.key, {}).get("run")
        folder = Folder(self.runs / run) if run else None
        if folder is None or not (folder.path / "config.yaml").is_file():
            return None
        was_started = provenance.read_metadata(folder).get("job") or folder.attempts() or folder.result
        return folder if was_started else None

    def read_state(self, point: Point) -> str:
        folder = self.find_folder(point)
        return "MISSING" if folder is None else status.read_state(folder)[0]

    def record_run(self, point: Point, folder: Folder, state: str) -> None:
        """Note a point's run; the one that it replaces is kept as an earlier one."""
        known = self.cells.get(point.key, {})
        earlier = known.get("earlier", [])
        if known.get("run") not in (None, folder.path.name):
            earlier = [*earlier, known["run"]]
        cell = {"values": point.values, "repeat": point.repeat, "run": folder.path.name, "state": state.lower()}
        self.cells[point.key] = cell | ({"earlier": earlier} if earlier else {})

    def forget_run(self, point: Point) -> None:
        """Forget a run that could not be submitted."""
        cell = self.cells.pop(point.key)
        if cell.get("earlier"):
            self.cells[point.key] = cell | {"run": cell["earlier"][-1], "earlier": cell["earlier"][:-1]}

    def save(self) -> None:
        order = {point.key: number for number, point in enumerate(self.plan.points)}
        cells = [self.cells[key] for key in sorted(self.cells, key=lambda key: order.get(key, len(order)))]
        facts = {"experiment": self.plan.experiment, "group": self.plan.name, "settings": self.plan.settings}
        write_json(self.path / "sweep.json", facts | {"cells": cells})

    def read_states(self) -> dict[str, str]:
        """Read and note the state of every point."""
        found = {point.key: self.read_state(point) for point in self.plan.points}
        for point in self.plan.points:
            if point.key in self.cells:
                self.cells[point.key]["state"] = found[point.key].lower()
        self.save()
        return found


def check_same_sweep(known: dict[str, Any], plan: Grid) -> None:
    """Raise UserError where a sweep was started with another experiment or other settings than `plan` has."""
    other_name = "or give the file another name, for a sweep of its own"
    experiment = known.get("experiment", plan.experiment)
    if experiment != plan.experiment:
        raise UserError(f"the sweep {plan.name} was started with experiment={experiment}; use that, {other_name}")
    settings = known.get("settings", plan.settings)
    changed = {key: value for key, value in settings.items() if plan.settings.get(key) != value}
    added = {key: value for key, value in plan.settings.items() if key not in settings}
    if changed:
        words = format_settings(changed)
        remedy = f"write ARGS={shlex.quote(words)}"
        if added:
            remedy += f" without {format_settings(added)}"
        raise UserError(f"the sweep {plan.name} was started with {words}; {remedy}, {other_name}")
    if added:
        words = format_settings(added)
        raise UserError(f"the sweep {plan.name} was started without {words}; leave that out, {other_name}")


def format_settings(settings: Mapping[str, str]) -> str:
    """Write settings as on the command line."""
    return " ".join(shlex.quote(f"{key}={value}") for key, value in settings.items())


@contextlib.contextmanager
def lock_sweep(path: Path) -> Iterator[None]:
    """Hold the lock of a sweep. Raises UserError where another command holds it."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(handle):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another make sweep is busy with {path}; wait for it, or end it") from None
        yield


def choose_points(sweep: Sweep, states: dict[str, str], failed: bool) -> list[tuple[Point, Folder | None]]:
    """Choose the points to start now, each with the run folder that it resumes, if any."""
    found: list[tuple[Point, Folder | None]] = []
    for point in sweep.plan.points:
        state = states[point.key]
        if state == "FAILED" if failed else state == "MISSING":
            found.append((point, None))
        elif state in GO_ON and not failed:
            found.append((point, sweep.find_folder(point)))
    return found


def leave_out_running_points(chosen: list[tuple[Point, Folder | None]]) -> list[tuple[Point, Folder | None]]:
    """Wait for attempts that are stopping; leave out, with a line, the points whose attempt does not stop in time."""
    ready: list[tuple[Point, Folder | None]] = []
    for point, folder in chosen:
        try:
            if folder is not None:
                liveness.wait_for_earlier_attempt(folder)
        except RunTaken as error:
            print(f"  skipped    {point.words}: {error}", flush=True)
        else:
            ready.append((point, folder))
    return ready


def make_point_folder(sweep: Sweep, point: Point, scheduler: Scheduler | None) -> Folder:
    """Make the run folder of a point; a notice that several points have is printed once."""
    return submit.prepare_run_folder(sweep.plan.experiment, point.settings, scheduler, sweep.shown_notices)


# ---- on a cluster


def refuse_elastic_points(plan: Grid) -> None:
    """Raise UserError where a point of a sweep asks for an elastic job."""
    if any(find_elastic(point.settings) for point in plan.points):
        raise UserError(
            "elastic=true is for single jobs, and a sweep is an array of jobs: use make exp, or LAUNCH=local"
        )


def find_task_shape(point: Point, folder: Folder | None) -> tuple[int, int, str]:
    """Find hosts, ranks on each, and the module that is executed: equal for all tasks of an array."""
    nodes = point.settings.launch.nodes
    return nodes, point.settings.processes // nodes, (find_entry_points(folder) if folder else CURRENT).job


def submit_points(
    sweep: Sweep, chosen: list[tuple[Point, Folder | None]], profile: Profile, scheduler: Scheduler
) -> None:
    """Submit points as arrays of jobs, one for each number of hosts and ranks."""
    for point, _ in chosen:
        submit.resolve_processes_per_node(point.settings, profile)
        submit.check_step_timeout(point.settings, profile)
    for nodes in {point.settings.launch.nodes for point, _ in chosen}:
        scheduler.check_enough_hosts(nodes, profile.partition)
    ordered = sorted(chosen, key=lambda one: find_task_shape(*one))
    for (nodes, per_node, _), same in itertools.groupby(ordered, lambda one: find_task_shape(*one)):
        submit_as_array(sweep, list(same), nodes, per_node, profile, scheduler)


def submit_as_array(
    sweep: Sweep,
    chosen: list[tuple[Point, Folder | None]],
    nodes: int,
    per_node: int,
    profile: Profile,
    scheduler: Scheduler,
) -> None:
    """Submit points with equal hosts and ranks as one array of jobs. Leaves no new folder if refused."""
    folders: list[Folder] = []
    with contextlib.ExitStack() as held:
        try:
            with contextlib.ExitStack() as undo:
                for point, given in chosen:
                    if given is not None:
                        held.enter_context(submission.hold_submission(given))
                        submit.check_is_over(given, point.settings)
                        undo.enter_context(submit.restore_result_on_error(given))
                    folders.append(given or make_point_folder(sweep, point, scheduler))
                    sweep.record_run(point, folders[-1], "pending")
                sweep.save()
                made = sbatch.prepare_runs_for_array(
                    sweep.path, folders, nodes, per_node, profile, scheduler, sweep.plan.parallel
                )
                jobs = sbatch.submit_array(made, folders)
        except BaseException:
            for (point, given), folder in zip(chosen, folders, strict=False):
                if given is None:
                    shutil.rmtree(folder.path, ignore_errors=True)
                    sweep.forget_run(point)
            sweep.save()
            raise
        for folder, job in zip(folders, jobs, strict=True):
            facts = {"id": job, "scheduler": scheduler.name, "profile": vars(profile), "logs": str(made.folder)}
            provenance.update_metadata(folder, job=facts)
    most = min(sweep.plan.parallel, len(folders))
    size = f"{format_count(nodes, 'node')} and {format_count(nodes * per_node, 'rank')} each"
    job = jobs[0].partition("_")[0]
    print(f"  job {job} on {scheduler.name}: an array of {len(folders)}, at most {most} at once, {size}", flush=True)


def follow_sweep(sweep: Sweep) -> int:
    """Print each change of a point's state until all are over; returns the exit status."""
    told: dict[str, str] = {}
    try:
        while True:
            states = sweep.read_states()
            for point in sweep.plan.points:
                if told.get(point.key) != states[point.key]:
                    print(f"  {states[point.key]:<9}  {point.words}", flush=True)
            told = states
            if all(state in (*status.OVER, "MISSING") for state in states.values()):
                return 0 if all(state == "FINISHED" for state in states.values()) else 1
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        print(f"\nno longer following; the jobs go on, see make compare SWEEP={sweep.plan.name}")
        return 128 + signal.SIGINT


# ---- here


def start_point(point: Point, folder: Folder) -> subprocess.Popen[bytes]:
    """Start a point on this machine; its output goes into its folder."""
    command, environ = submit.make_resume_command(folder), submit.make_source_environment(folder)
    with disk_errors(folder.path), open(folder.path / "screen.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)


def run_points(sweep: Sweep, chosen: list[tuple[Point, Folder | None]]) -> int:
    """Run points on this machine, some at once; returns the exit status. After Ctrl-C they save and stop."""
    busy: dict[subprocess.Popen[bytes], Point] = {}
    waiting, stopped, bad = list(chosen), 0, 0

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = number
        for run in busy:
            if number == signal.SIGTERM:  # Ctrl-C reaches them, too
                run.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while busy or (waiting and not stopped):
            while waiting and len(busy) < sweep.plan.parallel and not stopped:
                point, given = waiting.pop(0)
                folder = given or make_point_folder(sweep, point, None)
                run = start_point(point, folder)
                busy[run] = point
                sweep.record_run(point, folder, "running")
                sweep.save()
            for run in [run for run in busy if run.poll() is not None]:
                point = busy.pop(run)
                state = sweep.read_state(point)
                sweep.cells[point.key]["state"] = state.lower()
                sweep.save()
                bad += run.returncode != 0
                print(f"  {state:<9}  {point.words}  {sweep.cells[point.key]['run']}", flush=True)
            time.sleep(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + stopped if stopped else int(bool(bad))


# ---- the command


def print_points(sweep: Sweep) -> None:
    """Print the state, settings and run of each point."""
    for point in sweep.plan.points:
        run = sweep.cells.get(point.key, {}).get("run", "")
        print(f"  {sweep.read_state(point):<9}  {point.words}  {run}".rstrip())


def main(given: argparse.Namespace) -> int:
    """Run the points of a sweep that have no run yet; returns the exit status."""
    failed, follow, dry = (parse_switch(k.upper(), getattr(given, k)) for k in ("failed", "follow", "dry_run"))
    words, for_profile = split_settings(given.args)
    plan = sweep_file.read_sweep_file(given.grid, words)
    profile = sbatch.load_profile(given.cluster or "default", for_profile)
    scheduler = choose_scheduler(given.launch or "auto")
    if scheduler is not None:
        refuse_elastic_points(plan)
    path = (Path(plan.points[0].settings.runs) / "sweeps" / plan.name).absolute()
    if dry:
        print_points(Sweep(path, plan))
        return 0
    with lock_sweep(path):
        sweep = Sweep(path, plan)
        states = sweep.read_states()
        chosen = choose_points(sweep, states, failed)
        counts = ", ".join(f"{count} {state.lower()}" for state, count in Counter(states.values()).items())
        size = format_count(len(plan.points), "point")
        print(f"sweep {plan.name}: {size} of {plan.experiment} ({counts}); {len(chosen)} to run now")
        print(f"  folder   {path}\n  compare  make compare SWEEP={shlex.quote(plan.name)}", flush=True)
        if "FAILED" in states.values() and not failed:
            print("  failed ones begin anew with FAILED=1", flush=True)
        chosen = leave_out_running_points(chosen)
        if chosen and scheduler is None:
            return run_points(sweep, chosen)
        if chosen and scheduler is not None:
            submit_points(sweep, chosen, profile, scheduler)
        return follow_sweep(sweep) if follow else 0
