"""From a command line to processes that train: settings, data and run folder first, then the processes.

`start` is the last line of every experiment. Each process then calls the experiment's
`main(settings, world, run)`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from common import (
    checkup,
    config,
    launch,
    prepare,
    processes,
    provenance,
    schedules,
    seeds,
    snapshots,
    sweep,
    tracking,
)
from common.errors import LEFT, UserError
from common.folder import Folder, disk_errors, read_json, write_json
from common.launch import Place, World
from common.preemption import Left, Notice, name_the_silent
from common.prepare import Prepared
from common.run import Run
from configs.shared import Experiment

T = TypeVar("T", bound=Experiment)
Main = Callable[[T, World, Run], None]


def start(main: Main[T], schema: type[T], grid: sweep.Sweep[T] | None = None) -> None:
    """Run an experiment from its command line, with `sweep=true` the grid; never returns."""
    with config.user_errors():
        settings = config.load(schema, sys.argv[1:])
        schedules.preflight(settings)
        tracking.asked_mode(settings)
        place = launch.outside(os.environ)
        resume = config.parse(sys.argv[1:]).resume
        given = Folder(resume.absolute()) if resume else None
        if grid is not None and settings.sweep:  # type: ignore[attr-defined]
            sweep.only_here(given is None and place is None)
            sys.exit(sweep.run(grid, settings, sys.argv[1:], lambda chosen: start_here(main, chosen)))
        if place is None:
            sys.exit(start_here(main, settings, given)[1])
        status = join_there(main, settings, place, given)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # as forked ranks leave: a library's thread that still runs would abort an ordinary exit


def is_finished(folder: Folder | None, speaks: bool = True) -> bool:
    """Whether there is nothing left to do, which is then said."""
    if folder is None or folder.result.get("state") != "finished":
        return False
    if speaks:
        print(f"{folder.path} is finished; see {folder.path / 'result.json'}", flush=True)
    return True


def set_up(settings: Experiment, fallback: bool) -> tuple[Folder, Prepared]:
    """Data, and a new run folder with its first attempt; what is really used goes into the settings first."""
    prepared = prepare.prepare(settings.data, fallback)
    settings.data.name = prepared.name  # type: ignore[assignment]
    name = config.name_of(type(settings))
    folder = Folder.create(Path(settings.runs), name, config.to_yaml(settings))
    try:
        folder = folder.claim()
    except UserError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    if prepared.notice:
        print(prepared.notice, flush=True)
    print(f"{name}: {settings.processes} processes, data {prepared.name}, run folder {folder.path}", flush=True)
    return folder, prepared


def go_on(settings: Experiment, given: Folder) -> tuple[Folder, Prepared]:
    """The data and the next attempt of a run that was started before."""
    prepared = prepare.prepare(settings.data, fallback=False)
    known = read_json(given.path / "meta.json").get("data") or {}
    if known.get("sha256", prepared.facts()["sha256"]) != prepared.facts()["sha256"]:
        raise UserError(f"{given.path} was trained on other data than {prepared.path} holds now; bring the data back")
    folder = given.claim()
    changed = config.changes(given.path / "config.yaml", settings)
    if changed:
        write_json(folder.attempt / "changed.json", changed)
        words = ", ".join(f"{name} {then} -> {now}" for name, (then, now) in changed.items())
        print(f"with other settings than the run began with: {words}", flush=True)
    (given.path / "result.json").unlink(missing_ok=True)  # how an earlier start failed
    return folder, prepared


def document(folder: Folder, prepared: Prepared) -> None:
    """What can be written while the processes start."""
    if not (folder.path / "meta.json").exists():
        provenance.snapshot(folder)
        provenance.describe(folder, sys.argv, prepared.facts())
    provenance.begin(folder)
    prepared.verify()


def train(main: Main[T], settings: T, world: World, folder: Folder, prepared: Prepared, notice: Notice) -> None:
    """One process's part of a run."""
    if world.nodes > 1 and world.how != "local":
        look_around(world, folder)
    seed_all(seeds.derive(settings.seed, "init"))
    run = Run(settings, folder, world, prepared, notice)
    try:
        main(settings, world, run)
    except (RuntimeError, TimeoutError) as error:
        late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        silent = name_the_silent(world, max(2.0, 2 * run.step_seconds())) if late else ""
        run.note(silent or error)
        if silent:
            raise TimeoutError(silent) from error
        raise
    except Exception as error:
        run.note(error)
        raise
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()  # they heed no other signal, and a failed rank must not wait for them
        run.close()


def seed_all(seed: int) -> None:
    """The global streams of torch, numpy and python, the same in all processes."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def listening(settings: Experiment, folder: Folder | None, rank: int) -> Notice:
    """From here on a notice to stop is heard; stacks go to the rank's log, or to stderr where there is none yet."""
    log = open(folder.log_file(rank), "a") if folder else sys.stderr  # noqa: SIM115 (open as long as the process lives)
    notice = Notice(settings.checkpoint.grace, log)
    notice.listen()
    return notice


def look_around(world: World, folder: Folder) -> None:
    """Compare the hosts before training. Raises UserError on rank 0, naming the one that is not sound."""
    facts = world.gather(checkup.short(world, folder.path))
    wrong = world.broadcast(checkup.problems(facts, len(set(world.hosts))) if world.is_main else None)
    if wrong:
        leave_together()
        raise UserError("; ".join(wrong) if world.is_main else "another host is not sound; rank 0 names it")


def leave_together() -> None:
    """Let every process leave with its own exit status. All processes call it.

    srun and torchrun end the others as soon as one has left, and then tell of a signal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()


def start_here(main: Main[T], settings: T, given: Folder | None = None) -> tuple[Folder, int]:
    """Start the processes on this machine; returns the run folder and the exit status.

    `given` is the folder of a run to go on with.
    """
    if given is not None and is_finished(given):
        return given, 0
    settings.adapt(provenance.visible_gpus())
    folder, prepared = go_on(settings, given) if given else set_up(settings, fallback=True)
    if given:
        saved = bool(snapshots.candidates(folder))
        word = "goes on in " if saved else "has no checkpoint, and begins anew in " if folder.number > 1 else ""
        print(f"{given.experiment}: {settings.processes} processes, {word}run folder {given.path}", flush=True)

    def body(place: Place) -> None:
        notice = listening(settings, folder, place.rank)
        redirect(folder.log_file(place.rank), keep_stdout=place.rank == 0)
        with launch.group(place, settings.launch) as world:
            train(main, settings, world, folder, prepared, notice)

    tracker: tracking.Tracker | None = None

    def meanwhile() -> None:
        nonlocal tracker
        document(folder, prepared)
        if given:
            provenance.amend(folder, job=None)  # it is no longer a job's
        tracker = tracking.Tracker.start(settings, folder)

    status, reasons = 1, list[str]()
    try:
        status = processes.fork_all(body, settings.processes, settings.launch.nodes, meanwhile, reasons.append)
    except UserError:  # the set is damaged or the disk is full, found here and not by a rank
        if given is None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    finally:
        if folder.path.exists():
            conclude(folder, status, tracker, settings, why="".join(reasons))
    return folder, status


def join_there(
    main: Main[T], settings: T, place: Place, given: Folder | None = None, *, submitted: bool = False
) -> int:
    """Be one of the processes that torchrun or SLURM started; returns the exit status.

    `given` is the folder of a run that was submitted or is to go on; without one, rank 0 makes a new folder. Of a
    `submitted` run the job decides what becomes of it, not a process of it.
    """
    if place.size != settings.processes:
        raise UserError(f"{place.how} started {place.size} processes, the settings need {settings.processes}")
    if is_finished(given, place.rank == 0):
        return 0
    notice = listening(settings, None, place.rank)
    with launch.group(place, settings.launch) as world:
        if given is None and place.again:
            name = config.name_of(type(settings))
            mine = provenance.started_before(Path(settings.runs), name, sys.argv) if world.is_main else None
            given = world.broadcast(mine)
            if is_finished(given, world.is_main):
                return 0
        answer = world.broadcast(begin(settings, world, given) if world.is_main else None)
        if isinstance(answer, UserError):
            leave_together()
            if world.is_main:
                raise answer
            return 2
        folder, prepared = answer
        settings.data.name = prepared.name
        notice.log = open(folder.log_file(place.rank), "a")  # noqa: SIM115 (open as long as the process lives)
        tracker = tracking.Tracker.start(settings, folder) if world.is_main else None
        status = 1
        try:
            train(main, settings, world, folder, prepared, notice)
            status = 0
        except Left as left:
            status = int(str(left.code))
        finally:
            if world.is_main:
                conclude(folder, status, tracker, settings, submitted)
        if status == LEFT:
            leave_together()
    return status


def begin(settings: Experiment, world: World, given: Folder | None) -> tuple[Folder, Prepared] | UserError:
    """Rank 0's part of a start: the folder with its next attempt, and the data, or why there are none."""
    folder = given
    try:
        if given is None:
            folder, prepared = set_up(settings, fallback=world.nodes == 1)
        else:
            folder, prepared = go_on(settings, given)
        document(folder, prepared)
    except UserError as error:
        if given is None and folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        return error
    return folder, prepared


def conclude(
    folder: Folder,
    status: int,
    tracker: tracking.Tracker | None,
    settings: Experiment,
    submitted: bool = False,
    why: str = "",
) -> None:
    """Write how the run ended, or how it goes on, and let W&B finish."""
    try:
        ended = how_it_ended(folder, status, why)
        if not folder.result and not submitted and not folder.superseded:
            with contextlib.suppress(UserError):  # the full disk that ended the run has been told of
                write_json(folder.path / "result.json", ended)
            if ended["last_step"]:
                print(f"metrics up to step {ended['last_step']} are in {folder.metrics_file}", file=sys.stderr)
            if snapshots.candidates(folder):
                print(f"go on with: make exp RESUME={shlex.quote(str(folder.path))}", file=sys.stderr)
        state = folder.result.get("state", ended["state"])
        facts = {"world": read_json(folder.attempt / "world.json") or None}
        if not folder.superseded:  # else the newest entry of the history is another start's
            with contextlib.suppress(UserError):
                provenance.amend(folder, state=state, end=provenance.now(), **facts)
    finally:
        if tracker is not None:
            patience = settings.wandb.finish_timeout  # those who leave wait for each other, and somebody for them
            print(tracker.finish(min(patience, 5.0) if status == LEFT else patience), flush=True)


def how_it_ended(folder: Folder, status: int, why: str = "") -> dict[str, Any]:
    """The result of a start that did not finish the run; `why` is what is known of a failure."""
    steps = [row["global_step"] for row in folder.metrics()]
    ended: dict[str, Any] = {"state": "failed", "exit_status": status, "last_step": max(steps, default=0)}
    if status == 128 + signal.SIGINT:
        ended |= {"state": "cancelled", "reason": "stopped by Ctrl-C"}
    elif status == LEFT:
        ended |= {"state": "preempted", "reason": "told to stop, saved"}
    elif why:
        ended["reason"] = why
    return ended


def redirect(log: Path, *, keep_stdout: bool) -> None:
    """Send this process's stderr, and stdout unless it is rank 0's, to its log file, C++ libraries' words included."""
    with disk_errors(log):
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 2)
    if not keep_stdout:
        os.dup2(handle, 1)
    os.close(handle)
