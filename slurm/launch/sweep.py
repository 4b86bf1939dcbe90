"""The verb `sweep`: run each point of a grid, as a SLURM job array or on this machine.

The file runs/sweeps/<name of the sweep file>/sweep.json lists the run of each point. If the command is repeated, it
starts only points that have not been run yet, and resumes canceled, preempted, and lost runs. FAILED=1 runs failed
points again with the current source code. This module does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.config import config, yaml_values
from common.runs import provenance
from common.runs.folder import RunFolder, convert_disk_errors
from common.system.errors import RunTakenError, UserError
from common.system.signals import STOP_SIGNALS, STOPPED_STATUSES
from common.system.text import format_count
from configs.dataparallel import RanksPerNode, get_enabled_elastic_settings
from configs.fields import find_group
from configs.profile import Profile
from slurm.arguments import parse_zero_or_one, split_experiment_and_cluster_settings
from slurm.launch import strategy_sweep, submit, sweep_file
from slurm.launch.strategy_sweep import StrategyRequest
from slurm.launch.sweep_file import SweepPlan, SweepPoint
from slurm.launch.sweep_folder import REFUSED, SweepFolder, lock_sweep, remove_if_nothing_started
from slurm.reports import liveness, status
from slurm.scheduling import sbatch, submission
from slurm.scheduling.scheduler import Scheduler, choose_scheduler

RESUMABLE_STATES = ("CANCELLED", "PREEMPTED", "LOST")
POLL_SECONDS = 2.0
"""Time in seconds between two queries of the states of all points."""
PointRun = tuple[SweepPoint, RunFolder | None]
"""A point to run, and the folder of the run to resume. If the folder is None, a new run is started."""


def choose_points(sweep: SweepFolder, states: dict[str, str], retry_failed: bool) -> list[PointRun]:
    """Return the points to run: failed points if `retry_failed` is true, else missing and resumable points."""
    point_runs: list[PointRun] = []
    for point in sweep.plan.points:
        state = states[point.key]
        if state in (("FAILED", REFUSED) if retry_failed else ("MISSING",)):
            point_runs.append((point, None))
        elif state in RESUMABLE_STATES and not retry_failed:
            point_runs.append((point, sweep.find_run_folder(point)))
    return point_runs


def omit_points_with_running_attempts(point_runs: list[PointRun]) -> list[PointRun]:
    """Wait for attempts that are stopping. Omit points whose attempts do not stop in time."""
    ready: list[PointRun] = []
    for point, folder in point_runs:
        try:
            if folder is not None:
                liveness.wait_for_earlier_attempt(folder)
        except RunTakenError as error:
            print(f"  skipped    {point.label}: {error}", flush=True)
        else:
            ready.append((point, folder))
    return ready


def make_point_folder(sweep: SweepFolder, point: SweepPoint, scheduler: Scheduler | None) -> RunFolder:
    """Create the run folder of a point. A notice that applies to several points is printed only once."""
    return submit.prepare_run_folder(sweep.plan.experiment, point.settings, scheduler, sweep.shown_notices)


# ---- on a cluster


def reject_elastic_points(plan: SweepPlan) -> None:
    """Raise UserError if a point of a sweep has elastic=true."""
    if any(get_enabled_elastic_settings(point.settings) for point in plan.points):
        raise UserError(
            "elastic=true is not supported in the job array of a sweep; use make exp for single jobs, or LAUNCH=local"
        )


def count_hosts_and_ranks_per_host(point_run: PointRun) -> tuple[int, int]:
    """Return the number of hosts and ranks per host of a point. All jobs of an array have the same numbers."""
    settings = point_run[0].settings
    return settings.launch.nodes, settings.processes // settings.launch.nodes


def submit_points(sweep: SweepFolder, point_runs: list[PointRun], profile: Profile, scheduler: Scheduler) -> None:
    """Submit points as job arrays, one array for each combination of host count and ranks per host."""
    resolved: list[PointRun] = []
    for point, folder in point_runs:
        settings = submit.resolve_processes_per_node(point.settings, profile)
        submit.check_step_timeout(settings, profile)
        resolved.append((dataclasses.replace(point, settings=settings), folder))
    point_runs = sorted(resolved, key=count_hosts_and_ranks_per_host)
    for nodes in {point.settings.launch.nodes for point, _ in point_runs}:
        scheduler.check_enough_hosts(nodes, profile.partition)
    for shape, group in itertools.groupby(point_runs, count_hosts_and_ranks_per_host):
        submit_points_as_array(sweep, list(group), *shape, profile, scheduler)


def submit_points_as_array(
    sweep: SweepFolder,
    point_runs: list[PointRun],
    nodes: int,
    per_node: int,
    profile: Profile,
    scheduler: Scheduler,
) -> None:
    """Submit points as one job array. All points need the same number of hosts and ranks.

    If the submission fails, the new run folders are removed.
    """
    folders: list[RunFolder] = []
    with contextlib.ExitStack() as submissions:
        try:
            with contextlib.ExitStack() as results:
                for point, resumed in point_runs:
                    if resumed is not None:
                        submissions.enter_context(submission.lock_run_for_submission(resumed))
                        submit.check_run_has_ended(resumed, point.settings)
                        results.enter_context(submit.restore_result_on_error(resumed))
                    folder = resumed or make_point_folder(sweep, point, scheduler)
                    folders.append(folder)
                    sweep.record_run(point, folder, "pending")
                sweep.save()
                texts = [
                    format_settings_of_job(point, folder)
                    for (point, _), folder in zip(point_runs, folders, strict=True)
                ]
                executor = sbatch.prepare_runs_for_array(
                    sweep.path, folders, texts, nodes, per_node, profile, scheduler, sweep.plan.parallel
                )
                jobs = sbatch.submit_array(executor, folders)
        except BaseException:
            for (point, resumed), folder in zip(point_runs, folders, strict=False):
                if resumed is None:
                    shutil.rmtree(folder.path, ignore_errors=True)
                    sweep.forget_run(point)
            sweep.save()
            raise
        array = jobs[0].partition("_")[0]
        with submit.name_job_on_error(array, scheduler):
            for folder, job in zip(folders, jobs, strict=True):
                facts = submit.make_job_facts(job, scheduler, profile)
                provenance.update_metadata(folder, job=facts | {"logs": str(executor.folder)})
    parallel = min(sweep.plan.parallel, len(folders))
    print(
        f"  job {array} on {scheduler.name}: array of {len(folders)} jobs, at most {parallel} at a time, "
        f"{format_count(nodes, 'node')} and {format_count(nodes * per_node, 'rank')} each",
        flush=True,
    )


def format_settings_of_job(point: SweepPoint, folder: RunFolder) -> str:
    """Return the settings in config.yaml of a run as YAML, but with the number of ranks that its job will have."""
    values = config.read_config_file(folder.path / config.CONFIG_FILE)
    ranks = find_group(point.settings, RanksPerNode)
    if ranks is not None:
        values[config.RANKS_PER_NODE] = str(ranks.processes_per_node)
    return yaml_values.format_values(values)


def follow_sweep(sweep: SweepFolder) -> int:
    """Print every change of a point's state until all points have ended, and return the exit status."""
    printed: dict[str, str] = {}
    try:
        while True:
            states = sweep.read_states()
            for point in sweep.plan.points:
                if printed.get(point.key) != states[point.key]:
                    print(f"  {states[point.key]:<9}  {point.label}", flush=True)
            printed = states
            if all(state in (*status.FINAL_STATES, "MISSING", REFUSED) for state in states.values()):
                return 0 if all(state in ("FINISHED", REFUSED) for state in states.values()) else 1
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print(f"\nstopped following; the jobs continue. To compare them, use {sweep.compare_command}")
        return 128 + signal.SIGINT


# ---- on this machine


def make_folder_unless_stopped(
    sweep: SweepFolder, point: SweepPoint, get_stop_signal: Callable[[], int]
) -> RunFolder | None:
    """Create the run folder of a point. Return None, without a folder, if a stop signal is received meanwhile."""
    folder = make_point_folder(sweep, point, None)
    if not get_stop_signal():
        return folder
    shutil.rmtree(folder.path, ignore_errors=True)
    return None


def start_local_run_of_point(folder: RunFolder) -> subprocess.Popen[bytes]:
    """Start the run of a point on this machine. The run writes its output to screen.log in the run folder."""
    command = submit.make_resume_command(folder)
    environ = submit.make_source_environment(folder)
    with convert_disk_errors(folder.path), open(folder.path / "screen.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)


class LocalRun(NamedTuple):
    """A run of a point on this machine, whose process has been started."""

    point: SweepPoint
    is_resumed: bool
    started: float
    """Reading of time.monotonic() at the start of the process."""


def print_estimate(run: LocalRun, waiting: int, parallel: int) -> None:
    """Print how long the waiting runs take if they take as long as a run that has just finished."""
    seconds = math.ceil(waiting / parallel) * (time.monotonic() - run.started)
    minutes = format_count(math.ceil(seconds / 60), "minute")
    print(f"  {format_count(waiting, 'run')} not started yet; estimated time: {minutes}", flush=True)


@contextlib.contextmanager
def handle_stop_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` for each stop signal, unless this process ignores the signal."""
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old_handler in old_handlers.items():
            signal.signal(number, old_handler)


@contextlib.contextmanager
def stop_remaining_runs(running: Iterable[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Stop the runs that remain after an error, for example if the sweep's folder cannot be written, and wait."""
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def record_end(sweep: SweepFolder, point: SweepPoint) -> tuple[str, RunFolder]:
    """Record and print the state of a point whose run has ended. Return the state and the run folder."""
    state = sweep.record_state(point)
    run = sweep.cells[point.key]["run"]
    print(f"  {state:<9}  {point.label}  {run}", flush=True)
    return state, RunFolder(sweep.runs / run)


def run_points_locally(
    sweep: SweepFolder,
    point_runs: list[PointRun],
    on_end: Callable[[SweepPoint, RunFolder, int], None] | None = None,
    *,
    stops_with_run: bool = False,
) -> int:
    """Run points on this machine and return the exit status. The plan limits the number of parallel runs.

    `on_end` is called after each run with the point, the run folder, and the exit status as arguments. After Ctrl-C,
    SIGTERM, or SIGUSR2, the runs save a checkpoint and stop. If `stops_with_run` is true, a run that is stopped, for
    example by `make cancel`, also stops the sweep. The exit status of the stopped run is then returned.
    """
    waiting = list(point_runs)
    running: dict[subprocess.Popen[bytes], LocalRun] = {}
    is_estimated = False
    is_stop_announced = False
    stop_signal = 0
    stopped_status = 0
    has_failed = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stop_signal
        stop_signal = number
        if number != signal.SIGINT:  # the runs receive Ctrl-C directly from the terminal
            for process in running:
                process.send_signal(number)

    with handle_stop_signals(stop), stop_remaining_runs(running):
        while running or (waiting and not stop_signal and not stopped_status):
            while waiting and len(running) < sweep.plan.parallel and not stop_signal and not stopped_status:
                point, resumed = waiting.pop(0)
                folder = resumed or make_folder_unless_stopped(sweep, point, lambda: stop_signal)
                if folder is None:
                    break
                process = start_local_run_of_point(folder)
                running[process] = LocalRun(point, resumed is not None, time.monotonic())
                sweep.record_start(point, folder)
                if stop_signal:  # received before `stop` knew this process
                    process.send_signal(signal.SIGTERM)
            if stop_signal and running and not is_stop_announced:
                count = format_count(len(running), "run")
                print(f"  stopping   {count}; a run that trains saves a checkpoint first", flush=True)
                is_stop_announced = True
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                state, folder = record_end(sweep, run.point)
                has_failed |= process.returncode != 0 and state != REFUSED
                if stops_with_run and process.returncode in STOPPED_STATUSES:
                    stopped_status = process.returncode
                is_whole_run = state == "FINISHED" and not run.is_resumed
                if is_whole_run and waiting and not stop_signal and not is_estimated:
                    print_estimate(run, len(waiting), sweep.plan.parallel)
                    is_estimated = True
                if on_end is not None:
                    on_end(run.point, folder, process.returncode)
            time.sleep(0.1)
    if stopped_status:
        return stopped_status
    return 128 + stop_signal if stop_signal else int(has_failed)


# ---- the command


def print_points(sweep: SweepFolder) -> None:
    """Print the state, settings, and run of each point."""
    for point in sweep.plan.points:
        run = sweep.cells.get(point.key, {}).get("run", "")
        print(f"  {sweep.read_state(point):<9}  {point.label}  {run}".rstrip())


def print_sweep_summary(sweep: SweepFolder, states: dict[str, str], number_to_run: int) -> None:
    """Print the number of points in each state and the folder of the sweep."""
    plan = sweep.plan
    counts = [f"{count} {state.lower()}" for state, count in Counter(states.values()).items()]
    size = format_count(len(plan.points), "point")
    print(f"sweep {plan.name}: {size} of {plan.experiment} ({', '.join(counts)}); {number_to_run} to run now")
    print(f"  folder   {sweep.path}\n  compare  {sweep.compare_command}", flush=True)


def read_plan(args: argparse.Namespace, overrides: list[str], *, runs_here: bool) -> SweepPlan:
    """Return the sweep that the arguments of the command request. Raises UserError.

    `runs_here` is true if the runs are executed on this machine.
    """
    request = StrategyRequest(args.name, args.ranks, args.rounds)
    if strategy_sweep.is_strategy_grid(args.grid):
        return strategy_sweep.plan_strategies(request, overrides, runs_here=runs_here)
    if request.given_variables:
        names = " and ".join(request.given_variables)
        raise UserError(f"{names} can be set only with GRID={strategy_sweep.GRID_FILE}; omit {names}, or use this grid")
    return sweep_file.read_sweep_file(args.grid, overrides)


def main(args: argparse.Namespace) -> int:
    """Start or resume the points of a sweep, and return the exit status."""
    retry_failed = parse_zero_or_one("FAILED", args.failed)
    follow = parse_zero_or_one("FOLLOW", args.follow)
    dry_run = parse_zero_or_one("DRY_RUN", args.dry_run)
    arguments, profile_arguments = split_experiment_and_cluster_settings(args.args)
    scheduler = choose_scheduler(args.launch or "auto")
    plan = read_plan(args, arguments, runs_here=scheduler is None)
    profile = sbatch.load_profile(args.cluster or "default", profile_arguments)
    if scheduler is not None:
        reject_elastic_points(plan)
    path = (Path(plan.points[0].settings.runs) / "sweeps" / plan.name).absolute()
    if dry_run:
        print_points(SweepFolder(path, plan))
        strategy_sweep.print_refused(plan.refused)
        if plan.compares_strategies:
            print(f"settings of all runs: {strategy_sweep.format_settings_of_all_runs(plan)}")
        return 0

    with lock_sweep(path):
        sweep = SweepFolder(path, plan)
        states = sweep.read_states()
        point_runs = choose_points(sweep, states, retry_failed)
        print_sweep_summary(sweep, states, len(point_runs))
        strategy_sweep.print_refused(plan.refused)
        if "FAILED" in states.values() and not retry_failed:
            print("  to run the failed points again, set FAILED=1", flush=True)
        point_runs = omit_points_with_running_attempts(point_runs)
        exit_status = 0
        if point_runs and scheduler is None:
            with remove_if_nothing_started(sweep):
                exit_status = run_points_locally(sweep, point_runs, sweep.print_refused_run)
        elif point_runs and scheduler is not None:
            with remove_if_nothing_started(sweep):
                submit_points(sweep, point_runs, profile, scheduler)
        if follow and (scheduler is not None or not point_runs):
            exit_status = follow_sweep(sweep)
        if plan.compares_strategies and sweep.cells:
            strategy_sweep.report_strategies(sweep)
        if scheduler is None and exit_status in STOPPED_STATUSES:
            print("the sweep was stopped; to continue it, repeat the command", flush=True)
        return exit_status
