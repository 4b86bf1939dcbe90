"""From a command line to processes that train: settings, data and run folder first, then the processes.

`start` is the last line of every experiment. Each process then calls the experiment's
`main(cfg, run)`.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from common.checkpoint import extension, storage
from common.checkpoint.preemption import StopRequest, StopRequested, name_silent_ranks
from common.core import config, host_memory, seeds
from common.core.errors import DIVERGENCE, EXIT_RESUMABLE, NO_VALID_CHECKPOINT, UserError, is_timeout, user_errors
from common.data import prepare
from common.data.prepare import Prepared
from common.distributed import local_launcher, rendezvous
from common.distributed.rank_info import RankInfo, read_rank_info
from common.distributed.rendezvous import World
from common.pipeline import schedules
from common.runs import provenance, wandb_tracker
from common.runs.folder import Folder, disk_errors, read_json, write_json
from common.training import host_checks, sweep
from common.training.run import Run
from configs.shared import Experiment

T = TypeVar("T", bound=Experiment)
Main = Callable[[T, Run], None]


def start(main: Main[T], schema: type[T], grid: sweep.Sweep[T] | None = None) -> None:
    """Run an experiment from its command line, with `sweep=true` the grid; never returns."""
    with user_errors():
        settings = config.load_config(schema, sys.argv[1:])
        schedules.preflight(settings)
        wandb_tracker.read_requested_mode(settings)
        place = read_rank_info(os.environ)
        resume = config.parse_command_line(sys.argv[1:]).resume
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


def is_finished(folder: Folder | None, settings: Experiment, speaks: bool = True) -> bool:
    """Whether there is nothing left to do, which is then said. Raises UserError where a longer run cannot go on."""
    if folder is None or folder.result.get("state") != "finished" or extension.asks_for_more_steps(folder, settings):
        return False
    if speaks:
        print(extension.describe_finished(folder, settings), flush=True)
    return True


def check_memory(settings: Experiment) -> None:
    """Raise UserError where the model cannot fit into this host's memory; a GPU says so itself."""
    if settings.launch.device == "cpu" or not provenance.count_visible_gpus():
        host_memory.check_host_memory(settings)


def set_up(settings: Experiment, fallback: bool) -> tuple[Folder, Prepared]:
    """Data, and a new run folder with its first attempt; what is really used goes into the settings first."""
    prepared = prepare.prepare(settings.data, fallback)
    settings.data.name = prepared.name  # type: ignore[assignment]
    name = config.experiment_name(type(settings))
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
    for attempt in given.attempts():
        damaged = attempt.damaged_lines()
        if damaged:
            lines = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
            print(f"WARNING: {attempt.metrics_file}: damaged lines are left out: {lines}", file=sys.stderr, flush=True)
    longer = given.result.get("state") == "finished"
    folder = given.claim()
    changed = config.find_changes(given.path / "config.yaml", settings)
    if changed:
        write_json(folder.attempt / config.CHANGED, changed)
        print(f"with other settings than the run began with: {config.describe_changes(changed)}", flush=True)
    if longer:
        done, total = extension.count_steps(given, settings)
        print(f"trains on after step {done}; rates are those of a run of {total} steps from here on", flush=True)
    folder.retire_result()
    return folder, prepared


def document(folder: Folder, prepared: Prepared) -> None:
    """What can be written while the processes start."""
    if not (folder.path / "meta.json").exists():
        provenance.copy_source(folder)
        provenance.write_metadata(folder, sys.argv, prepared.facts())
    provenance.record_attempt(folder)
    prepared.verify()


def train(main: Main[T], settings: T, world: World, folder: Folder, prepared: Prepared, notice: StopRequest) -> None:
    """One process's part of a run."""
    if world.nodes > 1 and world.launcher != "local":
        look_around(world, folder)
    seed_all(seeds.derive_seed(settings.seed, "init"))
    run = Run(settings, folder, world, prepared, notice)
    try:
        notice.all_saved = True
        main(settings, run)
        if world.is_main and not run.finished:
            raise RuntimeError("main() returned without run.report(...): call it on all ranks when training is over")
    except (RuntimeError, TimeoutError) as error:
        if notice.all_saved and notice.comes():  # others have left before
            raise StopRequested(together=False) from error
        late = is_timeout(error)
        silent = name_silent_ranks(world, max(2.0, 2 * run.step_seconds())) if late else ""
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


def listening(settings: Experiment, folder: Folder | None, rank: int) -> StopRequest:
    """From here on a notice to stop is heard; stacks go to the rank's log, or to stderr where there is none yet."""
    log = open(folder.log_file(rank), "a") if folder else sys.stderr  # noqa: SIM115 (open as long as the process lives)
    notice = StopRequest(settings.checkpoint.grace, log)
    notice.listen()
    return notice


def look_around(world: World, folder: Folder) -> None:
    """Compare the hosts before training. Raises UserError on rank 0, naming the one that is not sound."""
    facts = world.gather(host_checks.collect_basic_facts(world, folder.path))
    wrong = world.broadcast(host_checks.find_problems(facts, len(set(world.hosts))) if world.is_main else None)
    if wrong:
        leave_together()
        raise UserError("; ".join(wrong) if world.is_main else "another host is not sound; rank 0 names it")


def leave_together() -> None:
    """Let every process leave with its own exit status. All processes call it.

    srun and torchrun end the others as soon as one has left, and then tell of a signal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()


def hold(folder: Folder) -> IO[str]:
    """Keep other processes of this machine from going on with a run; the file that holds the lock.

    Not those of a cluster: there a new start must not wait for one that a cut network has left behind.
    """
    file = open(folder.path / "config.yaml")  # noqa: SIM115 (the lock ends with it)
    with contextlib.suppress(OSError):  # a network disk may know no locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder.path} goes on in another process here; wait for it, or end it") from None
    return file


def start_here(main: Main[T], settings: T, given: Folder | None = None) -> tuple[Folder, int]:
    """Start the processes on this machine; returns the run folder and the exit status.

    `given` is the folder of a run to go on with.
    """
    if given is not None and is_finished(given, settings):
        return given, 0
    _lock = hold(given) if given is not None else None  # until this process ends
    settings.adapt(provenance.count_visible_gpus())
    check_memory(settings)
    folder, prepared = go_on(settings, given) if given else set_up(settings, fallback=True)
    if given:
        saved = bool(storage.list_candidates(folder))
        word = "goes on in " if saved else "has no checkpoint, and begins anew in " if folder.number > 1 else ""
        print(f"{given.experiment}: {settings.processes} processes, {word}run folder {given.path}", flush=True)

    def body(place: RankInfo) -> None:
        notice = listening(settings, folder, place.rank)
        redirect(folder.log_file(place.rank), keep_stdout=place.rank == 0)
        with rendezvous.joined_world(place, settings.launch) as world:
            train(main, settings, world, folder, prepared, notice)

    tracker: wandb_tracker.Tracker | None = None

    def meanwhile() -> None:
        nonlocal tracker
        document(folder, prepared)
        if given:
            provenance.update_metadata(folder, job=None)  # it is no longer a job's
        tracker = wandb_tracker.Tracker.start(settings, folder)

    status, reasons = 1, list[str]()
    try:
        status = local_launcher.run_ranks(body, settings.processes, settings.launch.nodes, meanwhile, reasons.append)
    except UserError:  # the set is damaged or the disk is full, found here and not by a rank
        if given is None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    finally:
        if folder.path.exists():
            conclude(folder, status, tracker, settings, why="".join(reasons))
    if folder.result.get("state") == "finished":  # whoever was told to stop when it was
        status = 0
    return folder, status


def join_there(
    main: Main[T], settings: T, place: RankInfo, given: Folder | None = None, *, submitted: bool = False
) -> int:
    """Be one of the processes that torchrun or SLURM started; returns the exit status.

    `given` is the folder of a run that was submitted or is to go on; without one, rank 0 makes a new folder. Of a
    `submitted` run the job decides what becomes of it, not a process of it.
    """
    if place.size != settings.processes:
        raise UserError(f"{place.launcher} started {place.size} processes, the settings need {settings.processes}")
    if is_finished(given, settings, place.rank == 0):
        return 0
    check_memory(settings)
    notice = listening(settings, None, place.rank)
    with rendezvous.joined_world(place, settings.launch) as world:
        if given is None and place.is_restart:
            name = config.experiment_name(type(settings))
            mine = provenance.find_earlier_run(Path(settings.runs), name, sys.argv) if world.is_main else None
            given = world.broadcast(mine)
            if is_finished(given, settings, world.is_main):
                return 0
        notice.all_saved = True
        try:
            answer = world.broadcast(begin(settings, world, given) if world.is_main else None)
        except (StopRequested, RuntimeError):
            if notice.number:
                return EXIT_RESUMABLE
            raise
        notice.all_saved = False
        if isinstance(answer, UserError):
            leave_together()
            if world.is_main:
                raise answer
            return 2
        folder, prepared = answer
        settings.data.name = prepared.name
        notice.log = open(folder.log_file(place.rank), "a")  # noqa: SIM115 (open as long as the process lives)
        tracker = wandb_tracker.Tracker.start(settings, folder) if world.is_main else None
        status, request = 1, None
        try:
            train(main, settings, world, folder, prepared, notice)
            status = 0
        except StopRequested as left:
            status, request = EXIT_RESUMABLE, left
        finally:
            if world.is_main:
                conclude(folder, status, tracker, settings, submitted)
        return leave(request, folder) if request else status


def leave(request: StopRequested, folder: Folder) -> int:
    """Leave a run that was told to stop, with the others if all have agreed on it; returns the exit status.

    Else whoever waits for this process learns it from the end of its connections.
    """
    if request.together:
        leave_together()
    finished = not request.together and folder.result.get("state") == "finished"
    return 0 if finished else EXIT_RESUMABLE


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
    except StopRequested:
        if given is None and folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return folder, prepared


def conclude(
    folder: Folder,
    status: int,
    tracker: wandb_tracker.Tracker | None,
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
            if storage.list_candidates(folder):
                print(f"go on with: {how_to_go_on(folder, settings, why)}", file=sys.stderr)
        state = folder.result.get("state", ended["state"])
        facts = {"world": read_json(folder.attempt / "world.json") or None}
        if not folder.superseded:  # else the newest entry of the history is another start's
            with contextlib.suppress(UserError):
                provenance.update_metadata(folder, state=state, end=provenance.utc_now(), **facts)
    finally:
        if tracker is not None:
            patience = settings.wandb.finish_timeout  # those who leave wait for each other, and somebody for them
            print(tracker.finish(min(patience, 5.0) if status == EXIT_RESUMABLE else patience), flush=True)


def how_to_go_on(folder: Folder, settings: Experiment, why: str) -> str:
    """What to type; the settings that made training diverge, or took too much memory, would do so again."""
    again = f"make exp RESUME={shlex.quote(str(folder.path))}"
    if re.search(DIVERGENCE, why):
        return f'{again} ARGS="optim.lr={settings.optim.lr / 2:g}"'
    if "ran out of memory" in why:
        return f"{again} where there is more memory, or begin a run with a smaller batch or model"
    if NO_VALID_CHECKPOINT in why:
        return f"{again} after removing {folder.path}/attempts/*/checkpoints: it then begins anew"
    return again


def how_it_ended(folder: Folder, status: int, why: str = "") -> dict[str, Any]:
    """The result of a start that did not finish the run; `why` is what is known of a failure."""
    steps = [row["global_step"] for row in folder.metrics()]
    ended: dict[str, Any] = {"state": "failed", "exit_status": status, "last_step": max(steps, default=0)}
    if status == 128 + signal.SIGINT:
        ended |= {"state": "cancelled", "reason": "stopped by Ctrl-C"}
    elif status == EXIT_RESUMABLE:
        saved = bool(storage.list_candidates(folder))
        ended |= {"state": "preempted", "reason": f"told to stop, {'saved' if saved else 'before the first step'}"}
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
