"""Attempts of a run.

An attempt is one start of the run and has its own folder. If torchrun or srun started the ranks, rank 0 manages the
attempt. If the ranks were forked, their parent process manages the attempt.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.checkpoint import storage
from common.config import changed_settings, config, custom_code
from common.config.config_keys import replace_values
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.runs import claims, provenance
from common.runs.failures import describe_error
from common.runs.folder import RunFolder, read_json, write_json
from common.runs.resolved_settings import record_resolved_settings
from common.runs.result import Result
from common.runs.tracking import wandb_tracker
from common.system import foreign_text
from common.system.causes import Cause
from common.system.errors import MachineError, RunTakenError, UserError, convert_shortage_error
from common.system.exit_status import EXIT_REFUSED, EXIT_RESUMABLE, get_exit_status
from common.system.signals import STOPPED_STATUSES
from common.system.text import format_count
from configs.memory import find_remedy_for_divided_updates
from configs.shared import Experiment, TrainingExperiment

T = TypeVar("T", bound=Experiment)


@dataclass(frozen=True)
class TrainingOutcome:
    """Outcome of training in this process: the exit status and, after a failure, the cause."""

    status: int
    """Exit status of the attempt; 75 (EXIT_RESUMABLE) after a stop request."""
    reason: str = ""
    """Why training failed, as text for the user; empty if training succeeded or the reason is unknown."""
    cause: Cause = Cause.OTHER
    """Cause of a failure."""
    is_agreed: bool = False
    """True if all ranks agreed to stop after the same step."""

    @classmethod
    def from_error(cls, raised: BaseException) -> TrainingOutcome:
        """Return the outcome of training that ended with an exception.

        The reason contains only messages for the user, because other errors are in the log.
        """
        error = convert_shortage_error(raised)
        status = 1
        if isinstance(error, UserError):
            status = EXIT_REFUSED
        elif isinstance(error, SystemExit):
            status = get_exit_status(error.code)
        is_message = isinstance(error, UserError | MachineError | SystemExit)
        reason = describe_error(error) if is_message else ""
        return cls(status, reason, foreign_text.classify_error(error))

    @property
    def is_refusal(self) -> bool:
        """Whether a UserError ended training. An experiment may also call `sys.exit` with the same status."""
        return self.status == EXIT_REFUSED and self.cause is not Cause.EXITED


@dataclass
class Attempt:
    """An attempt of a run: the folder of the attempt, and the prepared data set."""

    folder: RunFolder
    prepared: PreparedDataset
    is_new: bool
    """True if this is the first attempt of a run."""
    tracker: wandb_tracker.Tracker | None = None

    @classmethod
    def open(cls, cfg: Experiment, run_to_resume: RunFolder | None, *, fallback: bool) -> Attempt:
        """Claim the next attempt of an existing run, or set up a new run.

        If `fallback` is True, built-in data may replace missing data. Raises UserError if the data or the folder cannot
        be prepared; in this case, no new run folder remains.
        """
        folder, prepared = resume_run(cfg, run_to_resume) if run_to_resume else set_up_run(cfg, fallback)
        return cls(folder, prepared, run_to_resume is None)

    @classmethod
    def join_newest_attempt(cls, cfg: Experiment, run_folder: RunFolder | None) -> Attempt:
        """Join the newest attempt of a run, in which other ranks are training.

        Raises UserError if the data is missing on this host or has changed.
        """
        assert run_folder is not None
        prepared = prepare_data_of_run(cfg, run_folder)
        return cls(run_folder.list_attempts()[-1], prepared, is_new=False)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> Attempt:
        """Create an attempt from the `content` that another rank has sent; see `to_content`.

        Raises UserError if this host cannot see the folder of the attempt.
        """
        facts = content["prepared"]
        prepared = PreparedDataset(**facts | {"path": Path(facts["path"])})
        folder = RunFolder(Path(content["folder"]), content["number"])
        if not folder.attempt_folder.is_dir():
            raise UserError(
                f"host {socket.gethostname()} cannot see the run folder {folder.path}, which rank 0 has created; "
                "mount a shared disk at the same path on all hosts, and set runs to a folder on it"
            )
        return cls(folder, prepared, content["is_new"])

    def to_content(self) -> dict[str, Any]:
        """Return a JSON-serializable dict from which other ranks can create the same attempt."""
        return {
            "folder": str(self.folder.path),
            "number": self.folder.number,
            "prepared": asdict(self.prepared) | {"path": str(self.prepared.path)},
            "is_new": self.is_new,
        }

    def record_provenance(self, cfg: Experiment) -> None:
        """Record the source, package versions, machine, and data of the run.

        This method also records the start time of the attempt and verifies the checksums of the data. Raises UserError
        if the data is damaged or a file cannot be written.
        """
        code = self.folder.path / "code"
        if not (self.folder.path / "meta.json").exists():
            provenance.copy_source(self.folder)
            self.prepared.copy_user_files(code)
            provenance.write_metadata(self.folder, sys.argv, self.prepared.to_dict())
        provenance.record_attempt_start(self.folder)
        self.prepared.verify_checksums()

    @contextlib.contextmanager
    def delete_new_run_folder_on(self, *errors: type[BaseException]) -> Iterator[None]:
        """Delete the folder of a new run if the `with` block raises one of `errors`."""
        try:
            yield
        except errors:
            self.delete_new_run_folder()
            raise

    @property
    def has_started_training(self) -> bool:
        """True once rank 0 has recorded the step from which training starts."""
        return self.folder.parent_record is not None

    def delete_new_run_folder(self) -> None:
        """Delete the run folder if this attempt has created the folder.

        The folder is kept if a newer attempt has superseded this attempt.
        """
        if self.tracker is not None:
            self.tracker.kill()
        if self.is_new and not self.folder.is_superseded:
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def check_custom_optimizer(self, cfg: Experiment, *, is_joining: bool) -> None:
        """Check the custom optimizer of the run, if any, before the first step.

        In a new run, the original file is checked instead of the copy in the run folder, so that error messages name
        the original file. Raises UserError if a check fails.
        """
        if isinstance(cfg, TrainingExperiment) and ":" in cfg.optim.name:
            from common.training import optimizer_contract  # imported here because other runs do not need it

            uses_original = self.is_new and not is_joining
            optim = (cfg if uses_original else self.use_file_copies(cfg)).optim
            optimizer_contract.check_optimizer(optim)
            remedy = find_remedy_for_divided_updates(cfg)
            if remedy:
                optimizer_contract.check_independent_parameters(optim, remedy)

    def use_file_copies(self, cfg: T) -> T:
        """Return settings that refer to the copies of custom files in the run folder."""
        return custom_code.use_file_copies(cfg, self.folder.path / "code")

    def record_end(self, outcome: TrainingOutcome, cfg: Experiment, *, submitted: bool) -> None:
        """Record how the attempt ended, and print the command that resumes the run.

        This method also finishes tracking with W&B. Nothing is recorded or printed if a newer attempt has superseded
        this attempt. If `submitted` is True, the SLURM job writes the result, because the job outlives its ranks.
        """
        if not self.folder.attempt_folder.exists():  # the run folder was moved or deleted
            self._stop_tracking_moved_run()
            return
        if not self._is_current():
            if self.tracker is not None:  # the newer attempt sends the remaining data of this attempt to W&B
                self.tracker.kill()
            return

        try:
            result = make_unfinished_result(self.folder, outcome)
            if not self.folder.result and not submitted:
                with contextlib.suppress(UserError):  # a full disk has already been reported
                    result.write_once(self.folder)
                if result.last_step:
                    print(f"metrics up to step {result.last_step} are in {self.folder.metrics_file}", file=sys.stderr)
                print(describe_continuation(self.folder, cfg, outcome.cause), file=sys.stderr)
            elif outcome.status not in (0, *STOPPED_STATUSES) and has_finished_run(self.folder):
                path = self.folder.path / "result.json"
                print(f"the run is finished; the error occurred after the result was written: {path}", file=sys.stderr)

            # The result of a finished run already exists and has priority.
            state = self.folder.result.get("state", result.state)
            world = read_json(self.folder.attempt_folder / "world.json") or None
            with contextlib.suppress(UserError):
                provenance.update_metadata(self.folder, world=world)
                provenance.record_attempt_end(self.folder, state)
        finally:
            if self.tracker is not None:
                timeout = cfg.wandb.finish_timeout
                if outcome.status == EXIT_RESUMABLE:  # the other ranks and the scheduler wait for this process
                    timeout = min(timeout, 5.0)
                print(self.tracker.finish(timeout), flush=True)
            with contextlib.suppress(UserError):
                claims.mark_ended(self.folder)  # other hosts cannot check whether this process has ended

    def _is_current(self) -> bool:
        """Return True unless a newer attempt has superseded this attempt."""
        try:
            claims.raise_if_superseded(self.folder)
        except RunTakenError:
            return False
        return True

    def _stop_tracking_moved_run(self) -> None:
        """Stop tracking a run whose folder was moved or deleted.

        If W&B has created the folder again at the old path, the folder is deleted.
        """
        if self.tracker is None:
            return
        self.tracker.kill()
        path = self.folder.path
        if path.exists() and list(path.iterdir()) == [path / "wandb"]:
            shutil.rmtree(path, ignore_errors=True)


def is_run_finished(folder: RunFolder | None, cfg: Experiment, *, report: bool) -> bool:
    """Return True if a run is finished and the config does not extend it.

    If `report` is True, also print a message about the finished run.
    """
    if folder is None or folder.result.get("state") != "finished":
        return False
    from common.checkpoint import extension  # imported here because only resumed runs need it

    if extension.config_adds_steps(folder, cfg):
        return False
    if report:
        print(extension.explain_finished_run(folder, cfg), flush=True)
    return True


def has_finished_run(attempt: RunFolder) -> bool:
    """Return True if an attempt has finished the run and has not been superseded."""
    return attempt.result.get("state") == "finished" and not attempt.is_superseded


def set_up_run(cfg: Experiment, fallback: bool) -> tuple[RunFolder, PreparedDataset]:
    """Prepare the data and create a run folder with a first attempt.

    If another data set replaces the one in the config, resolved.yaml contains its name. Raises UserError if the data is
    missing or does not fit the model.
    """
    prepared = prepare.prepare_dataset_of_config(cfg, fallback)
    name = config.get_experiment_name(type(cfg))
    folder = RunFolder.create(Path(cfg.runs), name, config.format_yaml(cfg))
    try:
        record_resolved_settings(folder.path, prepare.list_replaced_settings(cfg, prepared))
        provenance.copy_custom_files(cfg, folder.path / "code")  # before a rank reads the copies
        folder = claims.claim_next_attempt(folder)
    except UserError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    if prepared.notice:
        print(prepared.notice, flush=True)
    data = f", data {prepared.name}" if isinstance(cfg, TrainingExperiment) else ""
    print(f"{name}: {format_count(cfg.processes, 'rank')}{data}, run folder {folder.path}", flush=True)
    return folder, prepared


def resume_run(cfg: Experiment, run_to_resume: RunFolder) -> tuple[RunFolder, PreparedDataset]:
    """Prepare the data and claim the next attempt of an existing run.

    Settings that differ from config.yaml are printed and recorded in the folder of the attempt. Raises UserError if the
    data has changed, and RunTakenError if another attempt is running.
    """
    prepared = prepare_data_of_run(cfg, run_to_resume)
    warn_of_damaged_metrics(run_to_resume)
    was_finished = run_to_resume.result.get("state") == "finished"
    folder = claims.claim_next_attempt(run_to_resume)
    provenance.copy_custom_files(cfg, folder.path / "code")
    changed = config.find_changes(run_to_resume.path, cfg)
    if changed:
        write_json(folder.attempt_folder / changed_settings.CHANGES_FILE, changed)
        text = changed_settings.describe_changes(changed)
        print(f"resumed with settings that differ from config.yaml: {text}", flush=True)
    if was_finished:
        from common.checkpoint import extension  # imported here because only resumed runs need it

        print(extension.describe_extension(run_to_resume, cfg), flush=True)
    folder.move_result_of_previous_attempt()
    return folder, prepared


def prepare_data_of_run(cfg: Experiment, run_folder: RunFolder) -> PreparedDataset:
    """Prepare the data of an existing run, which always uses the same data set. Raises UserError if it has changed."""
    code = run_folder.path / "code"
    settings = cfg
    name = config.read_settings(run_folder.path).get("data.name")
    if name is not None and isinstance(cfg, TrainingExperiment):
        settings = replace_values(cfg, {"data.name": name})
    recorded = provenance.read_metadata(run_folder).get("data") or {}
    recorded_name = recorded.get("name", name)
    if isinstance(cfg, TrainingExperiment) and name not in (None, recorded_name):
        raise UserError(
            f"{run_folder.path} was trained on data.name={recorded_name}, but its {config.RESOLVED_FILE} no longer "
            f"contains this setting; restore the file, or write `data.name: {recorded_name}` to it",
            cause=Cause.DAMAGED_DATA,
        )
    prepared = prepare.prepare_dataset_of_config(settings, fallback=False, code=code)
    checksums = prepared.to_dict()["sha256"]
    if recorded.get("sha256", checksums) != checksums:
        raise UserError(
            f"{run_folder.path} was trained on different data than {prepared.path} now contains; "
            "restore the original data",
            cause=Cause.DAMAGED_DATA,
        )
    return prepared


def warn_of_damaged_metrics(run_folder: RunFolder) -> None:
    """Print a warning about damaged lines in the metrics files of all attempts."""
    for attempt in run_folder.list_attempts():
        damaged = attempt.find_damaged_lines()
        if damaged:
            numbers = [str(number) for number in damaged[:10]]
            if len(damaged) > 10:
                numbers.append("...")
            text = f"{attempt.metrics_file}: ignoring damaged lines {', '.join(numbers)}"
            print(f"WARNING: {text}", file=sys.stderr, flush=True)


def describe_continuation(folder: RunFolder, cfg: Experiment, cause: Cause) -> str:
    """Return how the user can continue a run that has ended, with the command.

    If an unchanged run would fail again for the same `cause`, the text contains a remedy.
    """
    if cause is Cause.SOURCE_ERROR:
        command = provenance.format_new_run_command(folder)
        return f"fix the error, then start a new run: {command}\n{provenance.describe_old_source(folder)}"
    command = format_resume_command(folder, cfg, cause)
    if storage.list_resumable_checkpoints(folder):
        return f"resume with: {command}"
    return f"no checkpoint found; to restart from step 0: {command}"


def format_resume_command(folder: RunFolder, cfg: Experiment, cause: Cause) -> str:
    """Return the command that resumes a run, with a remedy for some causes."""
    command = f"make exp RESUME={shlex.quote(str(folder.path))}"
    if cause is Cause.DIVERGED and isinstance(cfg, TrainingExperiment):
        return f'{command} ARGS="optim.lr={cfg.optim.lr / 2:g}"'
    if cause is Cause.OUT_OF_MEMORY:
        return f"{command} on a machine with more memory, or start a new run with a smaller batch or model"
    if cause is Cause.NO_VALID_CHECKPOINT:
        return f"{command} after removing {folder.path}/attempts/*/checkpoints; the run then restarts from step 0"
    return command


def make_unfinished_result(folder: RunFolder, outcome: TrainingOutcome) -> Result:
    """Return the result of an attempt that did not finish the run."""
    status = outcome.status
    last_step = folder.find_last_step()
    if status == 128 + signal.SIGINT:
        return Result("cancelled", status, "stopped by Ctrl-C", last_step)
    if status == EXIT_RESUMABLE:
        saved = bool(storage.list_resumable_checkpoints(folder))
        when = "after saving a checkpoint" if saved else "before the first step"
        return Result("preempted", status, f"stopped on request, {when}", last_step)
    if status in STOPPED_STATUSES and not outcome.reason:  # no rank has failed
        return Result("preempted", status, f"stopped by {signal.Signals(status - 128).name}", last_step)
    return Result("failed", status, outcome.reason, last_step, outcome.cause)
