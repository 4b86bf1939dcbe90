"""One attempt at a run: set up or resumed before its ranks train, documented while they start, concluded after them.

The process that does this is rank 0 under torchrun and srun, and the parent of forked ranks.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.checkpoint import extension, storage
from common.core import config
from common.core.errors import DIVERGENCE, EXIT_RESUMABLE, NO_VALID_CHECKPOINT, SOURCE_ERROR, RunTaken, UserError
from common.core.text import format_count
from common.data import prepare
from common.data.prepare import Prepared
from common.distributed.transport import algorithms
from common.pipeline import schedules
from common.runs import claims, provenance, wandb_tracker
from common.runs.folder import Folder, read_json, write_json
from common.runs.result import Result
from common.training.optimization import own_files
from configs.shared import Experiment


@dataclass
class Attempt:
    """Folder of an attempt, claimed by this process, and the data it trains on."""

    folder: Folder
    prepared: Prepared
    is_new: bool
    """True for the first attempt of a run."""
    tracker: wandb_tracker.Tracker | None = None

    @classmethod
    def open(cls, cfg: Experiment, given: Folder | None, *, fallback: bool) -> Attempt:
        """Resume the run `given`, or set up a new one; with `fallback` generated data may replace what is missing.

        Raises UserError, and leaves no new folder behind then.
        """
        folder, prepared = set_up_run(cfg, fallback) if given is None else resume_run(cfg, given)
        return cls(folder, prepared, given is None)

    @classmethod
    def join(cls, cfg: Experiment, given: Folder | None) -> Attempt:
        """Join the attempt that other ranks of the run are at. Raises UserError where the data is missing here."""
        assert given is not None
        return cls(given.attempts()[-1], prepare_known_data(cfg, given), is_new=False)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> Attempt:
        """Make the attempt that another rank has opened, from its `content`."""
        prepared = Prepared(**content["prepared"] | {"path": Path(content["prepared"]["path"])})
        return cls(Folder(Path(content["folder"]), content["number"]), prepared, content["is_new"])

    def to_content(self) -> dict[str, Any]:
        """Return what the other ranks need of it, as JSON."""
        prepared = asdict(self.prepared) | {"path": str(self.prepared.path)}
        folder, number = str(self.folder.path), self.folder.number
        return {"folder": folder, "number": number, "prepared": prepared, "is_new": self.is_new}

    def document(self, cfg: Experiment) -> None:
        """Write source, versions, machine and data checksums of the run, and the start of this attempt.

        Raises UserError for damaged data and for a disk that refuses.
        """
        if not (self.folder.path / "meta.json").exists():
            provenance.copy_source(self.folder)
            self.prepared.copy_own_data_file(self.folder.path / "code")
            provenance.write_metadata(self.folder, sys.argv, self.prepared.to_dict())
        schedules.copy_schedule_file(cfg, self.folder.path / "code")
        algorithms.copy_algorithm_file(cfg.launch, self.folder.path / "code")
        own_files.copy_optimizer_files(cfg.optim, self.folder.path / "code")
        provenance.record_attempt_start(self.folder)
        self.prepared.verify_checksums()

    @contextlib.contextmanager
    def discard_on(self, *errors: type[BaseException]) -> Iterator[None]:
        """Delete the folder of a new run if one of `errors` ends the block: nothing half-made is left."""
        try:
            yield
        except errors:
            self.discard()
            raise

    @property
    def has_begun(self) -> bool:
        """True once its ranks have recorded where they begin to train."""
        return self.folder.parent_record is not None

    def discard(self) -> None:
        """Delete the folder of a new run, unless another attempt has taken it; an earlier run stays as it is."""
        if self.tracker is not None:
            self.tracker.kill()
        if self.is_new and not self.folder.is_superseded:
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def conclude(self, status: int, cfg: Experiment, *, submitted: bool, reason: str) -> None:
        """Write how the attempt ended and how to resume it, and let W&B finish; nothing where it is superseded.

        Of a `submitted` run the job writes the result, because it outlives its ranks.
        """
        if not self.folder.attempt.exists():  # moved or deleted
            self._leave_old_place()
            return
        if not self._is_current():
            if self.tracker is not None:  # the newer attempt passes on what W&B misses of this one
                self.tracker.kill()
            return
        try:
            ended = make_ending_result(self.folder, status, reason)
            if not self.folder.result and not submitted:
                with contextlib.suppress(UserError):  # the full disk that ended the run has been reported
                    ended.write_unless_there(self.folder)
                if ended.last_step:
                    print(f"metrics up to step {ended.last_step} are in {self.folder.metrics_file}", file=sys.stderr)
                if storage.list_resumable_checkpoints(self.folder):
                    print(f"go on with: {format_resume_command(self.folder, cfg, reason)}", file=sys.stderr)
                elif status:
                    again = format_resume_command(self.folder, cfg, reason)
                    print(f"no checkpoint found; to restart from step 0: {again}", file=sys.stderr)
            state = self.folder.result.get("state", ended.state)
            world = read_json(self.folder.attempt / "world.json") or None
            with contextlib.suppress(UserError):
                provenance.update_metadata(self.folder, world=world)
                provenance.record_attempt_end(self.folder, state)
        finally:
            if self.tracker is not None:
                patience = cfg.wandb.finish_timeout  # ranks that stop wait for each other, and a scheduler for them
                print(self.tracker.finish(min(patience, 5.0) if status == EXIT_RESUMABLE else patience), flush=True)
            with contextlib.suppress(UserError):
                claims.mark_ended(self.folder)  # for hosts that cannot see this process, and for a process that goes on

    def _is_current(self) -> bool:
        try:
            claims.check_still_current(self.folder)
        except RunTaken:
            return False
        return True

    def _leave_old_place(self) -> None:
        """End the tracking of a run whose folder is gone, and leave nothing where it was."""
        if self.tracker is None:
            return
        self.tracker.kill()
        path = self.folder.path
        if path.exists() and [found.name for found in path.iterdir()] == ["wandb"]:  # W&B has just begun
            shutil.rmtree(path, ignore_errors=True)


def is_finished(folder: Folder | None, cfg: Experiment, *, report: bool) -> bool:
    """Check for a run that has nothing left to do; print so with `report`.

    Raises UserError where more steps are asked for and the last checkpoint is gone.
    """
    if folder is None or folder.result.get("state") != "finished" or extension.has_more_steps(folder, cfg):
        return False
    if report:
        print(extension.describe_finished(folder, cfg), flush=True)
    return True


def set_up_run(cfg: Experiment, fallback: bool) -> tuple[Folder, Prepared]:
    """Prepare the data and make a run folder with its first attempt; the data set in use goes into the config first."""
    prepared = prepare.prepare_dataset(cfg.data, fallback, log=cfg.log)
    prepare.check_model_fits_data(cfg, prepared)
    cfg.data.name = prepared.name
    name = config.get_experiment_name(type(cfg))
    folder = Folder.create(Path(cfg.runs), name, config.format_yaml(cfg))
    try:
        folder = claims.claim_next_attempt(folder)
    except UserError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    if prepared.notice:
        print(prepared.notice, flush=True)
    words = [format_count(cfg.processes, "rank"), *([f"data {prepared.name}"] if cfg.trains else [])]
    print(f"{name}: {', '.join(words)}, run folder {folder.path}", flush=True)
    return folder, prepared


def resume_run(cfg: Experiment, given: Folder) -> tuple[Folder, Prepared]:
    """Prepare the data and claim the next attempt of an existing run.

    Raises UserError where the data has changed, RunTaken where another attempt is alive.
    """
    prepared = prepare_known_data(cfg, given)
    warn_of_damaged_metrics(given)
    extended = given.result.get("state") == "finished"
    folder = claims.claim_next_attempt(given)
    changed = config.find_changes(given.path / "config.yaml", cfg)
    if changed:
        write_json(folder.attempt / config.CHANGED, changed)
        print(f"resumed with other settings than in config.yaml: {config.describe_changes(changed)}", flush=True)
    if extended:
        done, epoch_steps = extension.read_step_counts(given)
        total = cfg.total_steps(epoch_steps)
        print(f"trains on after step {done}; learning rates are now those of a run of {total} steps", flush=True)
    folder.retire_result()
    return folder, prepared


def prepare_known_data(cfg: Experiment, given: Folder) -> Prepared:
    """Prepare the data of an existing run. Raises UserError where it has changed."""
    prepared = prepare.prepare_dataset(cfg.data, fallback=False, log=cfg.log, code=given.path / "code")
    known = provenance.read_metadata(given).get("data") or {}
    if known.get("sha256", prepared.to_dict()["sha256"]) != prepared.to_dict()["sha256"]:
        raise UserError(f"{given.path} was trained on other data than {prepared.path} holds now; bring the data back")
    return prepared


def warn_of_damaged_metrics(given: Folder) -> None:
    """Print the numbers of damaged lines in the metrics of all attempts; readers leave these lines out."""
    for attempt in given.attempts():
        damaged = attempt.find_damaged_lines()
        if damaged:
            lines = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
            print(f"WARNING: {attempt.metrics_file}: damaged lines are left out: {lines}", file=sys.stderr, flush=True)


def format_resume_command(folder: Folder, cfg: Experiment, reason: str) -> str:
    """Return the command that resumes a run, changed where it would fail again for the same reason."""
    if re.search(SOURCE_ERROR, reason):
        return provenance.advise_new_run(folder)
    again = f"make exp RESUME={shlex.quote(str(folder.path))}"
    if re.search(DIVERGENCE, reason):
        return f'{again} ARGS="optim.lr={cfg.optim.lr / 2:g}"'
    if "ran out of memory" in reason:
        return f"{again} where there is more memory, or begin a run with a smaller batch or model"
    if NO_VALID_CHECKPOINT in reason:
        return f"{again} after removing {folder.path}/attempts/*/checkpoints: it then begins anew"
    return again


def make_ending_result(folder: Folder, status: int, reason: str) -> Result:
    """Return the result of an attempt that did not finish the run; `reason` is the cause of a failure."""
    last = folder.find_last_step()
    if status == 128 + signal.SIGINT:
        return Result("cancelled", status, "stopped by Ctrl-C", last)
    if status == EXIT_RESUMABLE:
        saved = bool(storage.list_resumable_checkpoints(folder))
        when = "after saving a checkpoint" if saved else "before the first step"
        return Result("preempted", status, f"stopped on request, {when}", last)
    return Result("failed", status, reason, last)
