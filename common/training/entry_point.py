"""Entry point of experiments: parses the command line and trains on all ranks.

Every experiment script ends with a call to `start`. Ranks are forked by this module, or started by torchrun or srun.
Each rank calls the experiment's `main(cfg, run)`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from common.checkpoint import state_dicts, storage
from common.checkpoint.stop_request import StopRequest, StopRequested, synchronize_before_exit
from common.config import config, custom_code
from common.config.command_line import check_script, parse_command_line
from common.data.loader import DataWorkerError
from common.models import initial_weights
from common.ranks import backend_setup, local_launcher, rendezvous
from common.ranks.rank_info import RankInfo, read_rank_info, report_common_error_once
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.ranks.silent_ranks import describe_silent_ranks
from common.runs import provenance
from common.runs.failures import read_failure
from common.runs.folder import RunFolder
from common.runs.run_lock import lock_run, try_to_lock
from common.runs.tracking import wandb_account, wandb_tracker
from common.system import foreign_text, seeds
from common.system.causes import Cause
from common.system.errors import RankTimeoutError, UserError, convert_shortage_error, exit_on_user_error
from common.system.exit_status import EXIT_REFUSED, EXIT_RESUMABLE, ignore_successful_exit
from common.system.output import discard_unwritable_output
from common.system.processes import exit_without_cleanup
from common.system.signals import STOPPED_STATUSES
from common.system.text import format_count, read_end_of_file
from common.training.attempt import Attempt, TrainingOutcome, has_finished_run, is_run_finished
from common.training.host_resources import check_resources, print_notice_of_shared_cores
from common.training.model_errors import explain_layer_errors
from common.training.run import Run
from configs.dataparallel import get_enabled_elastic_settings
from configs.shared import Experiment
from configs.sweeps import is_sweep

T = TypeVar("T", bound=Experiment)
Main = Callable[[T, Run], None]


def start(main: Main[T], schema: type[T]) -> None:
    """Run an experiment, or a sweep of the experiment if `sweep=true`, and exit the process."""
    rank_info = None
    try:
        with exit_on_user_error():
            rank_info = read_rank_info(os.environ)
            sys.exit(run_from_command_line(main, schema, rank_info))
    except SystemExit as end:
        if rank_info is not None:
            exit_without_cleanup(end.code)
        raise


def run_from_command_line(main: Main[T], schema: type[T], rank_info: RankInfo | None) -> int:
    """Run the experiment with the settings on the command line, and return the exit status.

    This process forks the ranks if `rank_info` is None. Otherwise, this process is the rank that `rank_info` describes.
    """
    with report_common_error_once(rank_info):
        started = config.StartedRanks(rank_info.size, rank_info.nodes, rank_info.is_restart) if rank_info else None
        check_script(Path(sys.argv[0]).resolve(), config.get_experiment_name(schema))
        command_line = parse_command_line(sys.argv[1:])
        run_to_resume = RunFolder(command_line.resume.absolute()) if command_line.resume else None
        code = run_to_resume.path / "code" if run_to_resume else None
        if run_to_resume is not None:
            from common.checkpoint import extension  # imported here because only resumed runs need it

            extension.check_requested_ranks(run_to_resume, schema, command_line.values)
        cfg = config.load_config(schema, sys.argv[1:], started=started)

        # Report invalid settings before a rank loads data or waits for other ranks.
        custom_code.check_custom_settings(cfg, code, is_main=rank_info is None or rank_info.rank == 0)
        setup = backend_setup.import_backend_setup(cfg.launch.backend)
        if setup is not None:
            setup.check_tls(cfg.launch, rank_info)
        wandb_account.read_requested_mode(cfg)
        if run_to_resume is not None:
            extension.check_resume(run_to_resume, cfg)
        elif rank_info is None or not rank_info.is_restart:  # a restarted launch resumes an existing run
            initial_weights.check_weights_of_config(cfg)
        if is_sweep(cfg) and (run_to_resume is not None or rank_info is not None):
            raise UserError(
                "sweep=true starts one run after another and cannot be combined with srun, torchrun, RESUME, or "
                "--resume; to run a sweep on a cluster, use make sweep"
            )
        if rank_info is None:
            cfg = cfg.adapt_to_gpus(provenance.count_visible_gpus())
        ranks = ForkedRanks() if rank_info is None else LaunchedRank(rank_info, cfg)
    if is_sweep(cfg):
        replace_process_with_sweep(config.get_experiment_name(schema))
    _, status = run_experiment(main, cfg, ranks, run_to_resume)
    return status


def replace_process_with_sweep(name: str) -> None:
    """Replace this process with the sweep command, which starts a process for each run."""
    environ = os.environ | {"PYTHONPATH": str(config.ROOT), "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "slurm.launch.experiment_sweep", name, *sys.argv[1:]], environ)


def run_experiment(
    main: Main[T],
    cfg: T,
    ranks: ForkedRanks | LaunchedRank,
    run_to_resume: RunFolder | None = None,
    *,
    submitted: bool = False,
) -> tuple[RunFolder | None, int]:
    """Set up or resume a run, train it, and record how it ended.

    Returns the run folder and the exit status. If a rank raises UserError before training starts in a new run, the run
    folder is deleted. If `submitted` is True, the folder is kept, and the SLURM job of the run writes the result.
    """
    discard_unwritable_output()
    gc.freeze()  # modules that the experiment has imported live until the exit, like those of common.api
    if is_run_finished(run_to_resume, cfg, report=ranks.is_main):  # a finished run needs no memory check or rendezvous
        return run_to_resume, 0
    with ranks.acquire_run(cfg, run_to_resume) as run_folder:
        if is_run_finished(run_folder, cfg, report=ranks.is_main):
            return run_folder, 0
        attempt = ranks.open_attempt(cfg, run_folder)
        if isinstance(attempt, int):  # no attempt was opened; this is the exit status
            return run_folder, attempt

        outcome = TrainingOutcome(1)
        try:
            outcome = ranks.train(main, cfg, attempt)
        except (Exception, SystemExit) as error:  # the experiment may call sys.exit
            outcome = TrainingOutcome.from_error(error)
            raise
        finally:
            was_refused = outcome.is_refusal and attempt.is_new and not attempt.has_started_training
            if ranks.is_main and was_refused and not submitted:
                attempt.delete_new_run_folder()
            elif ranks.is_main:
                attempt.record_end(outcome, cfg, submitted=submitted)

        if outcome.is_agreed:
            synchronize_before_exit()
        elif outcome.status in STOPPED_STATUSES and has_finished_run(attempt.folder):
            return attempt.folder, 0  # a stop request after the last step has no effect
        return attempt.folder, outcome.status


class ForkedRanks:
    """Ranks that this process forks.

    The parent process opens the attempt and records how the attempt ended.
    """

    is_main = True

    def __init__(self) -> None:
        self.lock: IO[str] | None = None
        """Lock of a new run, held until this process exits."""

    @contextlib.contextmanager
    def acquire_run(self, cfg: Experiment, run_to_resume: RunFolder | None) -> Iterator[RunFolder | None]:
        """Lock and yield the run to resume, if any. Raises UserError if already locked."""
        with lock_run(run_to_resume) if run_to_resume is not None else contextlib.nullcontext():
            yield run_to_resume

    def open_attempt(self, cfg: Experiment, run_to_resume: RunFolder | None) -> Attempt | int:
        """Check this machine's devices and memory, and claim a new attempt. Raises UserError."""
        if cfg.launch.device == "cuda":  # report missing GPUs before any rank is forked
            rendezvous.check_gpus(cfg.processes, provenance.count_visible_gpus())
        check_resources(cfg)
        print_notice_of_shared_cores(cfg, cfg.processes)
        attempt = Attempt.open(cfg, run_to_resume, fallback=True)
        if run_to_resume is None:
            self.lock = try_to_lock(attempt.folder)
            return attempt

        folder = attempt.folder
        action = ""
        if storage.list_resumable_checkpoints(folder) or storage.list_lost_checkpoints(folder):
            action = "resuming in "
        elif folder.number > 1:
            action = "no checkpoint found; restarting from step 0 in "
        ranks = format_count(cfg.processes, "rank")
        print(f"{run_to_resume.experiment}: {ranks}, {action}run folder {run_to_resume.path}", flush=True)
        return attempt

    def train(self, main: Main[T], cfg: T, attempt: Attempt) -> TrainingOutcome:
        """Fork the ranks, record the attempt, and wait until the ranks exit. Raises UserError."""
        folder = attempt.folder
        elastic = get_enabled_elastic_settings(cfg)

        def train_forked(rank_info: RankInfo) -> None:
            log_file = folder.log_file(rank_info.original_rank)
            stop = StopRequest.listen(cfg.checkpoint.grace, open(log_file, "a"))  # noqa: SIM115 (the file stays open until the rank exits)
            may_be_main = rank_info.rank == 0 or elastic is not None  # in an elastic run, any rank may become rank 0
            local_launcher.redirect_output(log_file, keep_stdout=may_be_main)
            launch = custom_code.use_file_copies(cfg.launch, folder.path / "code")
            with rendezvous.join_world(rank_info, launch, folder.attempt_folder / ".private") as world:
                train_rank(main, cfg, Ranks(world), attempt, stop)

        def record_attempt() -> None:
            attempt.record_provenance(cfg)
            if not attempt.is_new:
                provenance.update_metadata(folder, job=None)  # this attempt does not belong to a SLURM job
            attempt.tracker = wandb_tracker.Tracker.start(cfg, folder)

        failure = ("", Cause.OTHER)

        def set_failure(reason: str, cause: Cause) -> None:
            nonlocal failure
            failure = (reason, cause)

        with attempt.delete_new_run_folder_on(UserError):  # raised by `record_attempt`
            status = local_launcher.run_ranks(
                train_forked,
                cfg.processes,
                cfg.launch.nodes,
                record_attempt,
                set_failure,
                elastic,
                lambda rank: read_end_of_file(folder.log_file(rank)),
                cfg.launch.setup_timeout,
                lambda rank: read_failure(folder, rank),
                cfg.checkpoint.grace,
            )
        return TrainingOutcome(status, *failure)


class LaunchedRank:
    """A rank started by torchrun or srun.

    Rank 0 also opens the attempt and records how the attempt ended.
    """

    def __init__(self, rank_info: RankInfo, cfg: Experiment) -> None:
        """Raise UserError if the number of launched ranks does not match the config."""
        if rank_info.size != cfg.processes and not rank_info.is_joining:
            remedy = f"srun -n {cfg.processes}"
            if rank_info.launcher == "torchrun":
                remedy = f"--nproc-per-node={cfg.processes // rank_info.nodes}"
            raise UserError(
                f"{rank_info.launcher} started {format_count(rank_info.size, 'rank')}, but the settings require "
                f"{cfg.processes}; use {remedy}, or change {cfg.rank_settings}"
            )
        self.started_as = rank_info
        self.ranks: Ranks | None = None
        """None before this rank has joined the other ranks."""
        self.stop = StopRequest.listen(cfg.checkpoint.grace, sys.stderr)

    @property
    def rank_info(self) -> RankInfo:
        """Position of this rank among the ranks, which may change in an elastic run."""
        return self.ranks.current if self.ranks is not None else self.started_as

    @property
    def world(self) -> World:
        """The ranks that train now. This rank must have joined the other ranks."""
        assert self.ranks is not None
        return self.ranks.current

    @property
    def is_main(self) -> bool:
        """True on rank 0. In an elastic run, another rank may become rank 0 later."""
        return self.rank_info.rank == 0 and not self.rank_info.is_joining

    @contextlib.contextmanager
    def acquire_run(self, cfg: Experiment, run_to_resume: RunFolder | None) -> Iterator[RunFolder | None]:
        """Join the other ranks and yield the run to resume, if any.

        If SLURM or torchrun has restarted the ranks, the run of the previous attempt is resumed.
        """
        check_resources(cfg)
        launch = cfg.launch
        parent = Path(cfg.runs)
        if run_to_resume:
            launch = custom_code.use_file_copies(launch, run_to_resume.path / "code")
            parent = run_to_resume.path
        private = backend_setup.get_key_folder(parent, self.rank_info)
        with rendezvous.join_world(self.rank_info, launch, private) as world:
            self.ranks = Ranks(world)
            if run_to_resume is None and self.rank_info.is_restart:
                run_to_resume = self._find_run_of_same_launch(cfg)
            yield run_to_resume

    def _find_run_of_same_launch(self, cfg: Experiment) -> RunFolder | None:
        """Return the run of this launch's previous attempt. All ranks must call this method."""
        earlier = None
        if self.is_main:
            name = config.get_experiment_name(type(cfg))
            earlier = provenance.find_run_of_same_launch(Path(cfg.runs), name, sys.argv)
        path = self.world.broadcast(str(earlier.path) if earlier else None)
        return RunFolder(Path(path)) if path else None

    def open_attempt(self, cfg: Experiment, run_to_resume: RunFolder | None) -> Attempt | int:
        """Return the attempt that rank 0 opens, or an exit status if opening fails.

        If rank 0 cannot open the attempt, UserError is raised on rank 0, and other ranks return EXIT_REFUSED. A rank
        that joins an elastic run returns the newest attempt. All other ranks must call this method together.
        """
        if self.rank_info.is_joining:
            return Attempt.join_newest_attempt(cfg, run_to_resume)
        try:
            with self.stop.interruptible():
                opened = self._try_open_attempt(cfg, run_to_resume) if self.is_main else None
                content = self.world.broadcast(opened.to_content() if isinstance(opened, Attempt) else None)
        except (StopRequested, RuntimeError):
            if self.stop.signal_number:
                return EXIT_RESUMABLE
            raise
        if content is None:
            synchronize_before_exit()
            if isinstance(opened, UserError):
                raise opened
            return EXIT_REFUSED
        return Attempt.from_content(content)

    def _try_open_attempt(self, cfg: Experiment, run_to_resume: RunFolder | None) -> Attempt | UserError:
        """Claim a new attempt and record its provenance. Return the UserError if a step fails."""
        try:
            attempt = Attempt.open(cfg, run_to_resume, fallback=self.world.nodes == 1)
            print_notice_of_shared_cores(cfg, self.rank_info.local_size)
            with attempt.delete_new_run_folder_on(UserError, StopRequested):
                attempt.record_provenance(cfg)
        except UserError as error:
            return error
        return attempt

    def train(self, main: Main[T], cfg: T, attempt: Attempt) -> TrainingOutcome:
        """Train on this rank. Rank 0 also starts tracking the attempt with W&B."""
        assert self.ranks is not None
        self.stop.write_stacks_to(attempt.folder.log_file(self.rank_info.original_rank))
        if self.is_main and not self.rank_info.coordinator:  # in an elastic job, the launcher tracks the run
            attempt.tracker = wandb_tracker.Tracker.start(cfg, attempt.folder)
        try:
            train_rank(main, cfg, self.ranks, attempt, self.stop)
        except StopRequested as request:
            return TrainingOutcome(EXIT_RESUMABLE, is_agreed=request.together)
        return TrainingOutcome(0)


def train_rank(main: Main[T], cfg: T, ranks: Ranks, attempt: Attempt, stop: StopRequest) -> None:
    """Call the experiment's `main` on one rank, and log the cause of any failure."""
    world = ranks.current
    if world.nodes > 1 and world.launcher != "local" and not world.is_joining:
        from common.training import host_checks  # imported here because other runs do not need it

        host_checks.check_hosts(world, attempt.folder.path, mixed=cfg.launch.mixed)
    cfg = initial_weights.omit_weights_on_resume(cfg, attempt.folder)
    state_dicts.seed_global_rngs(seeds.derive_seed(cfg.seed, "init"))
    run_cfg = attempt.use_file_copies(cfg)
    run = Run(run_cfg, attempt.folder, ranks, attempt.prepared, stop)
    try:
        # The launcher sends a signal after another rank has failed. Outside this block, the signal hides no error.
        with stop.interruptible(run.can_stop_immediately):
            attempt.check_custom_optimizer(cfg, is_joining=world.is_joining)
            setup = backend_setup.import_backend_setup(world.backend)
            if setup is not None:
                setup.set_all_reduce_algorithm(run_cfg.launch, attempt.folder.path, world)
            with ignore_successful_exit(), explain_layer_errors():
                main(run_cfg, run)
        if run.world.is_main and not run.finished:
            raise RuntimeError("main() did not call run.report(...); add this call after the training loop")
    except (RuntimeError, RankTimeoutError, BlockingIOError) as raised:  # BlockingIOError: os.fork failed
        error = convert_shortage_error(raised)
        # A stop request may have caused this error: ranks without unsaved state stop immediately and close their
        # connections. SIGTERM does not prove a stop request, because srun also sends SIGTERM when a rank has failed.
        is_timeout = foreign_text.classify_error(error) is Cause.TIMEOUT
        was_notified = stop.signal_number == signal.SIGUSR2 and not is_timeout
        if was_notified or (run.can_stop_immediately() and stop.wait_for_request()):
            raise StopRequested(together=False) from error
        patience = max(2.0, 2 * run.compute_step_seconds())
        silent = describe_silent_ranks(run.world, patience) if is_timeout else ""
        run.log_failure(silent or error)
        if isinstance(error, DataWorkerError) and run.recovery is not None:
            run.recovery.exit_if_others_can_continue(str(error))
        if silent:
            raise RankTimeoutError(silent) from error
        if error is not raised:
            raise error from raised
        raise
    except StopRequested:
        raise
    except (Exception, SystemExit) as error:  # the experiment may call sys.exit
        run.log_failure(error)
        raise
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()  # data workers ignore all other signals, and a failed rank must not wait for its workers
        run.close()
