"""Task that each rank of a job executes. The task is a small picklable object with the path of the run folder.

Submitit pickles the task by reference, so a job imports this module when the job starts. The job script puts `code/` of
the run folder first on the import path. All attempts of a job therefore execute the source code that was submitted.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from submitit import JobEnvironment
from submitit.helpers import DelayedSubmission

from common.ranks.rank_info import (
    COORDINATOR_VARIABLE,
    ORPHAN_COMMAND_VARIABLE,
    REPLACED_RANK_VARIABLE,
    read_rank_info,
)
from common.runs.failures import Failure
from common.runs.folder import RunFolder
from common.system.causes import Cause
from common.system.errors import (
    MachineError,
    UserError,
    convert_shortage_error,
    exit_on_user_error,
)
from common.system.exit_status import EXIT_FAILED, EXIT_RESUMABLE
from common.system.imports import import_without_garbage_collection
from common.system.processes import exit_without_cleanup
from slurm.scheduling import submission
from slurm.scheduling.job_failures import record_job_failure
from slurm.scheduling.orphaned_rank import reaches_coordinator

if TYPE_CHECKING:
    from common.training.entry_point import LaunchedRank

CONNECTION_ATTEMPTS = 4
"""Number of failed connections after which the coordinator is considered lost. A network can drop packets."""


class Job:
    """Task that trains as one rank of a submitted run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self) -> None:
        folder = RunFolder(Path(self.folder))
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, exit_resumable)
        if REPLACED_RANK_VARIABLE not in os.environ:
            JobEnvironment().paths.result_pickle.unlink(missing_ok=True)  # left by an earlier attempt
        if folder.result.get("state") == "cancelled":
            sys.exit(int(folder.result["exit_status"]))
        try:
            with exit_on_user_error():
                sys.exit(train_as_rank(folder))
        except SystemExit as end:
            # A restarted rank exits here, because Submitit would save the result under the name of another task.
            if end.code or REPLACED_RANK_VARIABLE in os.environ:
                exit_without_cleanup(end.code)
        atexit.register(exit_after_submitit)

    def checkpoint(self) -> DelayedSubmission:
        """Return this task, which Submitit then requeues. All progress is stored in the run folder."""
        return DelayedSubmission(self)


def exit_after_submitit() -> None:
    """Exit without cleanup after Submitit has saved the result of this rank, or has failed to save it."""
    has_raised_error = hasattr(sys, "last_type")
    exit_without_cleanup(int(has_raised_error))


def exit_resumable(number: int, frame: object) -> None:
    """Exit with the exit status of a resumable run.

    An exception raised here instead could abort the process while a library is being imported.
    """
    os._exit(EXIT_RESUMABLE)


def train_as_rank(folder: RunFolder) -> int:
    """Train as the rank that srun started, and return the exit status. Raises UserError."""
    rank: LaunchedRank | None = None
    try:
        if os.environ.get("SLURM_PROCID") == "0" and REPLACED_RANK_VARIABLE not in os.environ:
            submission.check_run_belongs_to_this_job(folder)
        with import_without_garbage_collection():
            from common.config import config
            from common.training import entry_point  # imported here, because this import takes seconds

        schema = config.import_schema(folder.experiment)
        cfg = config.build_config(schema, [config.read_config_file(folder.path / "submit" / "config.yaml")])
        rank_info = read_rank_info(os.environ)
        assert rank_info is not None, "a job task must be started by srun"
        rank = entry_point.LaunchedRank(rank_info, cfg)
        main = importlib.import_module(f"experiments.{folder.experiment}").main
        status = entry_point.run_experiment(main, cfg, rank, folder, submitted=True)[1]
        if status == EXIT_RESUMABLE:
            replace_rank_if_coordinator_is_lost(rank, "stop request")
        return status
    except UserError as error:
        if is_joining_rank(rank):  # the other ranks continue without this rank
            raise
        replace_rank_if_coordinator_is_lost(rank, str(error))
        failure = Failure.from_error(error)
        if failure.cause is not Cause.UNREACHABLE or not may_be_reachable_in_next_attempt(rank):
            record_job_failure(folder, read_original_rank(), failure, is_refusal=True)
            raise
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 (any error ends the rank with a suitable exit status)
        explained = convert_shortage_error(error)
        failure = Failure.from_error(explained)
        if isinstance(explained, MachineError):
            print(f"error: {explained}", file=sys.stderr)
        else:
            traceback.print_exc()
        replace_rank_if_coordinator_is_lost(rank, type(error).__name__)
    except SystemExit as end:  # raised by the experiment or by a stop request
        if end.code != EXIT_RESUMABLE and not is_joining_rank(rank):
            record_job_failure(folder, read_original_rank(), Failure.from_error(end), is_refusal=False)
        raise
    # A stop request or the failure of another rank may have caused the error.
    if not is_joining_rank(rank) and (rank is None or not rank.stop.wait_for_request()):
        record_job_failure(folder, read_original_rank(), failure, is_refusal=False)
    return 1 if rank is not None and rank.stop.signal_number == signal.SIGUSR2 else EXIT_FAILED


def read_original_rank() -> int:
    """Return the rank that this process has or, in an elastic job, had before other ranks were lost."""
    return int(os.environ.get(REPLACED_RANK_VARIABLE) or os.environ.get("SLURM_PROCID", "0"))


def replace_rank_if_coordinator_is_lost(rank: LaunchedRank | None, reason: str) -> None:
    """Replace this process with `orphaned_rank` if the launcher of an elastic job is lost.

    The job script and the coordinator run on the first host. If that host is lost, only a rank can requeue the job.
    """
    command = json.loads(os.environ.get(ORPHAN_COMMAND_VARIABLE, "[]"))
    if not command or is_joining_rank(rank):
        return
    if any(reaches_coordinator(os.environ[COORDINATOR_VARIABLE]) for _ in range(CONNECTION_ATTEMPTS)):
        return
    print(f"this rank is leaving the run: the coordinator is unreachable ({reason})", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # The new program inherits this setting. Preemption must not end the only process that can requeue the job.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.execvp(command[0], command)


def may_be_reachable_in_next_attempt(rank: LaunchedRank | None) -> bool:
    """Return whether another attempt may reach the rank or host that did not answer.

    A restarted job may get different hosts. Ranks that receive a stop request may exit before they have connected to
    all others. If ranks cannot be reached when a job first starts, the user must fix a wrong host name or a network
    problem.
    """
    is_restart = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return is_restart or (rank is not None and rank.stop.wait_for_request())


def is_joining_rank(rank: LaunchedRank | None) -> bool:
    """Return whether this is a restarted rank that has not yet joined the other ranks."""
    return REPLACED_RANK_VARIABLE in os.environ and (rank is None or rank.rank_info.is_joining)
