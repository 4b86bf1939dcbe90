"""From a command line to ranks that train: one flow, with ranks forked here or already started by torchrun or srun.

`start` is the last line of every experiment. Each rank then calls the experiment's `main(cfg, run)`.
"""

from __future__ import annotations

import contextlib
import math
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
from common.core.errors import EXIT_RESUMABLE, UserError, exit_on_user_error, is_timeout, summarize_error
from common.core.processes import exit_at_once
from common.core.text import format_count
from common.data.loader import is_worker_failure
from common.distributed import algorithm_choice, local_launcher, private_folder, rendezvous
from common.distributed.rank_info import RankInfo, read_rank_info, report_refusal_once
from common.distributed.rendezvous import World
from common.distributed.silent_ranks import name_silent_ranks
from common.distributed.transport import algorithms
from common.models import initial_weights
from common.pipeline import schedules
from common.runs import provenance, wandb_account, wandb_tracker
from common.runs.folder import Folder
from common.training import host_checks, sweep
from common.training.attempt import Attempt, is_finished, lock_run
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
        cfg = config.load_config(schema, sys.argv[1:])
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
        return sweep.run_sweep(cfg, sys.argv[1:], lambda chosen: run_experiment(main, chosen, ForkedRanks()))
    _, status = run_experiment(main, cfg, ranks, given)
    return status


def run_experiment(
    main: Main[T], cfg: T, ranks: ForkedRanks | LaunchedRank, given: Folder | None = None, *, submitted: bool = False
) -> tuple[Folder | None, int]:
    """Set up a run or resume `given`, document and track it, train, conclude; return its folder and the exit status.

    Of a `submitted` run the job decides what happens after this attempt. Raises UserError.
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
        finally:
            if ranks.is_main:
                attempt.conclude(ending.status, cfg, submitted=submitted, reason=ending.reason)
        if ending.together:
            synchronize_exit()
        elif attempt.folder.result.get("state") == "finished":  # a stop request that came too late changes nothing
            return attempt.folder, 0
        return attempt.folder, ending.status


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

    @contextlib.contextmanager
    def acquire_run(self, cfg: Experiment, given: Folder | None) -> Iterator[Folder | None]:
        """Lock the run to resume. Raises UserError where another process holds it."""
        with lock_run(given) if given is not None else contextlib.nullcontext():
            yield given

    def open_attempt(self, cfg: Experiment, given: Folder | None) -> Attempt | int:
        """Fit the config to this machine and claim the attempt. Raises UserError."""
        cfg.fit_devices(provenance.count_visible_gpus())
        check_memory(cfg)
        attempt = Attempt.open(cfg, given, fallback=True)
        if given is not None:
            folder = attempt.folder
            saved = bool(storage.list_resumable_checkpoints(folder))
            word = "goes on in " if saved else "has no checkpoint, and begins anew in " if folder.number > 1 else ""
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
            ranks, nodes = cfg.processes, cfg.launch.nodes
            status = local_launcher.run_ranks(
                train_forked, ranks, nodes, document, reasons.append, elastic, cfg.launch.setup_timeout
            )
        return Ending(status, "".join(reasons))


class LaunchedRank:
    """This rank among those that torchrun or srun started: rank 0 opens, documents and concludes the attempt, too."""

    def __init__(self, rank_info: RankInfo, cfg: Experiment) -> None:
        """Raise UserError if torchrun or SLURM started another number of ranks than the config needs."""
        if rank_info.size != cfg.processes and not rank_info.joins:
            raise UserError(
                f"{rank_info.launcher} started {format_count(rank_info.size, 'rank')}, "
                f"the settings need {cfg.processes}"
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
    except StopRequested:
        run.write_heartbeat(math.inf)  # of the step that was saved
        raise
    except (RuntimeError, TimeoutError) as error:
        # A rank that has nothing to lose stops at once, and another may have done its first step by then. SIGTERM does
        # not count: srun sends it where another rank has failed.
        if (stop.number == signal.SIGUSR2 and not is_timeout(error)) or (stop.all_saved and stop.await_request()):
            raise StopRequested(together=False) from error
        silent = name_silent_ranks(world, max(2.0, 2 * run.step_seconds())) if is_timeout(error) else ""
        run.log_failure(silent or error)
        if is_worker_failure(error):
            # it can come at any point, also in the middle of an update: the state of this rank does not count any more
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises the error again when another worker ends
            run.leave_if_possible(summarize_error(error))
        if silent:
            raise TimeoutError(silent) from error
        raise
    except Exception as error:
        stop.all_saved = False  # what a launcher sends where other ranks have ended hides no error
        run.log_failure(error)
        raise
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()  # they ignore all other signals, and a failed rank must not wait for them
        run.close()


def check_memory(cfg: Experiment) -> None:
    """Raise UserError where the model cannot fit into this host's memory; a GPU reports that itself."""
    if cfg.launch.on_cpu or not provenance.count_visible_gpus():
        host_memory.check_host_memory(cfg)


def listen_for_stop(cfg: Experiment, log: IO[str]) -> StopRequest:
    """Handle stop signals from now on; `log` receives the stacks if this rank has to be ended."""
    stop = StopRequest(cfg.checkpoint.grace, log)
    stop.listen()
    return stop
