"""From a command line to ranks that train: one flow, with ranks forked here or already started by torchrun or srun.

`start` is the last line of every experiment. Each rank then calls the experiment's `main(cfg, run)`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from common.checkpoint import extension, state_dicts, storage
from common.checkpoint.stop_request import StopRequest, StopRequested, synchronize_exit
from common.core import config, host_memory, seeds
from common.core.errors import (
    EXIT_REFUSED,
    EXIT_RESUMABLE,
    MachineError,
    UserError,
    exit_on_user_error,
    explain_error,
    is_timeout,
)
from common.core.processes import count_host_cores, exit_at_once
from common.core.text import format_count, read_tail
from common.data.loader import DataWorkerError
from common.distributed import algorithm_choice, local_launcher, private_folder, rendezvous
from common.distributed.rank_info import RankInfo, read_rank_info, report_refusal_once
from common.distributed.rendezvous import World
from common.distributed.silent_ranks import name_silent_ranks
from common.distributed.transport import algorithms
from common.models import initial_weights
from common.pipeline import schedules
from common.runs import provenance, wandb_account, wandb_tracker
from common.runs.folder import Folder
from common.runs.run_lock import lock_run, try_to_lock
from common.training import host_checks
from common.training.attempt import Attempt, is_finished
from common.training.contract import optimizer
from common.training.optimization import own_files
from common.training.run import Run
from configs.elastic import find_elastic
from configs.shared import Experiment

T = TypeVar("T", bound=Experiment)
Main = Callable[[T, Run], None]


def start(main: Main[T], schema: type[T]) -> None:
    """Run an experiment from its command line, with `sweep=true` the grid; never returns."""
    rank_info = None
    try:
        with exit_on_user_error():
            rank_info = read_rank_info(os.environ)
            sys.exit(run_command_line(main, schema, rank_info))
    except SystemExit as end:
        if rank_info is not None:
            exit_at_once(end.code)
        raise


def run_command_line(main: Main[T], schema: type[T], rank_info: RankInfo | None) -> int:
    """Run what the command line asks for, with ranks of its own or as one rank; return the exit status."""
    with report_refusal_once(rank_info):
        started = config.StartedRanks(rank_info.size, rank_info.nodes) if rank_info is not None else None
        cfg = config.load_config(schema, sys.argv[1:], started=started)
        path = config.parse_command_line(sys.argv[1:]).resume
        given, code = (Folder(path.absolute()), path.absolute() / "code") if path else (None, None)
        schedules.check_schedule_of_config(cfg, code)
        own_files.check_files_of_config(cfg.optim, code)
        if rank_info is None or rank_info.rank == 0:  # which tells the others
            algorithms.check_algorithm_of_config(cfg, code)
        private_folder.check_tls(cfg.launch, rank_info)
        wandb_account.read_requested_mode(cfg)
        if given is not None:
            extension.check_settings_of_finished(given, cfg)
        elif rank_info is None or not rank_info.is_restart:  # which goes on with a run
            initial_weights.check_weights_of_config(cfg)
        if getattr(cfg, "sweep", False) and (given is not None or rank_info is not None):
            raise UserError(
                "sweep=true starts its runs itself, one after the other: start it without srun, torchrun, "
                "RESUME and --resume; make sweep runs a grid on a cluster"
            )
        ranks = ForkedRanks() if rank_info is None else LaunchedRank(rank_info, cfg)
    if getattr(cfg, "sweep", False):
        exec_sweep(config.get_experiment_name(schema))
    _, status = run_experiment(main, cfg, ranks, given)
    return status


def exec_sweep(name: str) -> None:
    """Replace this process by the sweep of an experiment, which starts a process for each run."""
    environ = os.environ | {"PYTHONPATH": str(config.ROOT), "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "slurm.launch.experiment_sweep", name, *sys.argv[1:]], environ)


def run_experiment(
    main: Main[T],
    cfg: T,
    ranks: ForkedRanks | LaunchedRank,
    given: Folder | None = None,
    *,
    submitted: bool = False,
) -> tuple[Folder | None, int]:
    """Set up a run or resume `given`, document and track it, train, conclude; return its folder and the exit status.

    A new run whose ranks refuse it before its first step leaves no folder. Of a `submitted` run the job decides what
    happens after this attempt. Raises UserError.
    """
    if is_finished(given, cfg, report=ranks.is_main):  # before memory is checked and ranks meet
        return given, 0
    with ranks.acquire_run(cfg, given) as known:
        if is_finished(known, cfg, report=ranks.is_main):
            return known, 0
        attempt = ranks.open_attempt(cfg, known)
        if isinstance(attempt, int):
            return known, attempt
        ending = Ending(1)
        try:
            ending = ranks.train(main, cfg, attempt)
        except UserError as error:
            ending = Ending(EXIT_REFUSED, str(error))
            raise
        except (RuntimeError, OSError) as error:
            cause = explain_error(error)
            ending = Ending(1, str(cause) if isinstance(cause, MachineError) else "")
            raise
        finally:
            refused = ending.status == EXIT_REFUSED and attempt.is_new and not attempt.has_begun
            if ranks.is_main and refused and not submitted:
                attempt.discard()
            elif ranks.is_main:
                attempt.conclude(ending.status, cfg, submitted=submitted, reason=ending.reason)
        if ending.together:
            synchronize_exit()
        elif has_finished(attempt.folder):  # a stop request that came too late changes nothing
            return attempt.folder, 0
        return attempt.folder, ending.status


def has_finished(attempt: Folder) -> bool:
    """Check that an attempt has finished the run, and no newer one has begun."""
    return attempt.result.get("state") == "finished" and not attempt.is_superseded


@dataclass(frozen=True)
class Ending:
    """End of training in this process: exit status and reason."""

    status: int
    """Exit status; 75 (EXIT_RESUMABLE) after a stop request."""
    reason: str = ""
    """Cause of a failure, as far as it is known."""
    together: bool = False
    """True where all ranks agreed to stop after the same step."""


class ForkedRanks:
    """Ranks that this process forks: it opens, documents and concludes the attempt, they train."""

    is_main = True

    def __init__(self) -> None:
        self.lock: IO[str] | None = None
        """Of a new run: held until this process ends."""

    @contextlib.contextmanager
    def acquire_run(self, cfg: Experiment, given: Folder | None) -> Iterator[Folder | None]:
        """Lock the run to resume. Raises UserError where another process holds it."""
        with lock_run(given) if given is not None else contextlib.nullcontext():
            yield given

    def open_attempt(self, cfg: Experiment, given: Folder | None) -> Attempt | int:
        """Fit the config to this machine and claim the attempt. Raises UserError."""
        gpus = provenance.count_visible_gpus()
        cfg.fit_devices(gpus)
        if cfg.launch.device == "cuda":
            rendezvous.check_gpus(cfg.processes, gpus)  # the ranks would refuse it, too, but later
        check_memory(cfg)
        print_notice_of_shared_cores(cfg, cfg.processes)
        attempt = Attempt.open(cfg, given, fallback=True)
        if given is None:
            self.lock = try_to_lock(attempt.folder)
        else:
            folder = attempt.folder
            saved = bool(storage.list_resumable_checkpoints(folder) or storage.list_lost_checkpoints(folder))
            restart = "no checkpoint found; restarting from step 0 in " if folder.number > 1 else ""
            word = "goes on in " if saved else restart
            ranks = format_count(cfg.processes, "rank")
            print(f"{given.experiment}: {ranks}, {word}run folder {given.path}", flush=True)
        return attempt

    def train(self, main: Main[T], cfg: T, attempt: Attempt) -> Ending:
        """Fork the ranks, document the attempt while they start, and wait for them. Raises UserError."""
        folder, elastic = attempt.folder, find_elastic(cfg)

        def train_forked(rank_info: RankInfo) -> None:
            stop = listen_for_stop(cfg, open(folder.log_file(rank_info.number), "a"))  # noqa: SIM115 (until the rank ends)
            keeps = rank_info.rank == 0 or elastic is not None  # then any rank may become rank 0
            local_launcher.redirect_output(folder.log_file(rank_info.number), keep_stdout=keeps)
            launch = algorithms.use_kept_file(cfg.launch, folder.path / "code")
            with rendezvous.joined_world(rank_info, launch, folder.attempt / ".private") as world:
                train_rank(main, cfg, world, attempt, stop)

        def document() -> None:
            attempt.document(cfg)
            if not attempt.is_new:
                provenance.update_metadata(folder, job=None)  # it no longer belongs to a job
            attempt.tracker = wandb_tracker.Tracker.start(cfg, folder)

        reasons = list[str]()
        with attempt.discard_on(UserError):  # damaged data or a full disk, found by `document`
            status = local_launcher.run_ranks(
                train_forked,
                cfg.processes,
                cfg.launch.nodes,
                document,
                reasons.append,
                elastic,
                lambda rank: read_tail(folder.log_file(rank)),
                cfg.launch.setup_timeout,
            )
        return Ending(status, "".join(reasons))


class LaunchedRank:
    """This rank among those that torchrun or srun started: rank 0 opens, documents and concludes the attempt, too."""

    def __init__(self, rank_info: RankInfo, cfg: Experiment) -> None:
        """Raise UserError if torchrun or SLURM started another number of ranks than the config needs."""
        if rank_info.size != cfg.processes and not rank_info.joins:
            number = "processes_per_node" if hasattr(cfg, "processes_per_node") else "the number of stages"
            option = f"--nproc-per-node={cfg.processes // rank_info.nodes}"
            remedy = option if rank_info.launcher == "torchrun" else f"srun -n {cfg.processes}"
            raise UserError(
                f"{rank_info.launcher} started {format_count(rank_info.size, 'rank')}, the settings need "
                f"{cfg.processes}; use {remedy}, or change {number}"
            )
        self.rank_info = rank_info
        self.stop = listen_for_stop(cfg, sys.stderr)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which may be another one at the end of an elastic run."""
        return self.rank_info.rank == 0 and not self.rank_info.joins

    @contextlib.contextmanager
    def acquire_run(self, cfg: Experiment, given: Folder | None) -> Iterator[Folder | None]:
        """Join the other ranks; without a `given` run a restart gets the run of the attempt before it."""
        check_memory(cfg)
        launch = algorithms.use_kept_file(cfg.launch, given.path / "code") if given else cfg.launch
        private = private_folder.name_folder(given.path if given else Path(cfg.runs), self.rank_info)
        with rendezvous.joined_world(self.rank_info, launch, private) as self.world:
            self.rank_info = self.world  # follows its changes
            if given is None and self.rank_info.is_restart:
                name = config.get_experiment_name(type(cfg))
                mine = provenance.find_earlier_run(Path(cfg.runs), name, sys.argv) if self.is_main else None
                path = self.world.broadcast(str(mine.path) if mine else None)
                given = Folder(Path(path)) if path else None
            yield given

    def open_attempt(self, cfg: Experiment, given: Folder | None) -> Attempt | int:
        """Let rank 0 claim and document the attempt; an exit status where there is none, a UserError on rank 0."""
        if self.rank_info.joins:
            return Attempt.join(cfg, given)
        self.stop.all_saved = True
        try:
            opened = self._try_open(cfg, given) if self.is_main else None
            content = self.world.broadcast(opened.to_content() if isinstance(opened, Attempt) else None)
        except (StopRequested, RuntimeError):
            if self.stop.number:
                return EXIT_RESUMABLE
            raise
        self.stop.all_saved = False
        if content is None:
            synchronize_exit()
            if isinstance(opened, UserError):
                raise opened
            return 2
        attempt = Attempt.from_content(content)
        cfg.data.name = attempt.prepared.name
        return attempt

    def _try_open(self, cfg: Experiment, given: Folder | None) -> Attempt | UserError:
        try:
            attempt = Attempt.open(cfg, given, fallback=self.world.nodes == 1)
            print_notice_of_shared_cores(cfg, self.rank_info.local_size)
            with attempt.discard_on(UserError, StopRequested):
                attempt.document(cfg)
        except UserError as error:
            return error
        return attempt

    def train(self, main: Main[T], cfg: T, attempt: Attempt) -> Ending:
        """Train as one rank, and track the attempt on rank 0."""
        self.stop.log = open(attempt.folder.log_file(self.rank_info.number), "a")  # noqa: SIM115 (until the process ends)
        if self.is_main and not self.rank_info.coordinator:  # else the launcher tracks, which outlives every rank
            attempt.tracker = wandb_tracker.Tracker.start(cfg, attempt.folder)
        try:
            train_rank(main, cfg, self.world, attempt, self.stop)
        except StopRequested as request:
            return Ending(EXIT_RESUMABLE, together=request.together)
        return Ending(0)


def train_rank(main: Main[T], cfg: T, world: World, attempt: Attempt, stop: StopRequest) -> None:
    """Call the experiment's main on one rank, and log why it failed."""
    if world.nodes > 1 and world.launcher != "local" and not world.joins:
        host_checks.check_hosts(world, attempt.folder.path, mixed=cfg.launch.mixed)
    state_dicts.seed_global_rngs(seeds.derive_seed(cfg.seed, "init"))
    run = Run(cfg, attempt.folder, world, attempt.prepared, stop)
    try:
        stop.all_saved = True
        is_begun = attempt.is_new and not world.joins
        optimizer.check_optimizer_of_run(cfg.optim, attempt.folder.path / "code", named=is_begun)
        algorithm_choice.resolve_algorithm(cfg.launch, attempt.folder.path, world)
        initial_weights.leave_out_replaced_weights(cfg, attempt.folder)
        main(cfg, run)
        if world.is_main and not run.finished:
            raise RuntimeError("main() returned without run.report(...): call it on all ranks when training is over")
    except (RuntimeError, TimeoutError, BlockingIOError) as raised:  # the last one by a fork
        error = explain_error(raised)
        # A rank that has nothing to lose stops at once, and another may have done its first step by then. SIGTERM does
        # not count: srun sends it where another rank has failed.
        if (stop.number == signal.SIGUSR2 and not is_timeout(error)) or (stop.all_saved and stop.await_request()):
            raise StopRequested(together=False) from error
        silent = name_silent_ranks(world, max(2.0, 2 * run.step_seconds())) if is_timeout(error) else ""
        run.log_failure(silent or error)
        if isinstance(error, DataWorkerError):
            run.leave_if_possible(str(error))
        if silent:
            raise TimeoutError(silent) from error
        if error is not raised:
            raise error from raised
        raise
    except Exception as error:
        stop.all_saved = False  # what a launcher sends where other ranks have ended hides no error
        run.log_failure(error)
        raise
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()  # they ignore all other signals, and a failed rank must not wait for them
        run.close()


def print_notice_of_shared_cores(cfg: Experiment, ranks: int) -> None:
    """Print a line where this host has fewer cores than ranks that compute on them."""
    cores = count_host_cores()
    if ranks > cores and (cfg.launch.on_cpu or not provenance.count_visible_gpus()):
        print(
            f"{ranks} ranks share {format_count(cores, 'core')} of this host and take turns: steps are slow", flush=True
        )


def check_memory(cfg: Experiment) -> None:
    """Raise UserError where the model cannot fit into this host's memory; a GPU reports that itself."""
    if cfg.launch.on_cpu or not provenance.count_visible_gpus():
        host_memory.check_host_memory(cfg)


def listen_for_stop(cfg: Experiment, log: IO[str]) -> StopRequest:
    """Handle stop signals from now on; `log` receives the stacks if this rank has to be ended."""
    stop = StopRequest(cfg.checkpoint.grace, log)
    stop.listen()
    return stop
