"""Atomic checkpoints: each rank writes one file, and a single rename publishes all files together.

All files are flushed to the disk before the checkpoint is published. When a checkpoint is loaded, each file is compared
with the checksum that was computed while the file was written. If any rank cannot write its file, the checkpoint is not
published. If any rank cannot read a checkpoint, all ranks reject the checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from common.checkpoint import storage
from common.checkpoint.loading import LoadedCheckpoint, ReadProblem, try_read_checkpoint
from common.checkpoint.rank_file import WriteProblem, write_rank_file
from common.checkpoint.state_dicts import convert_to_plain_values
from common.checkpoint.storage import CheckpointPath, Manifest, ManifestEntry, StagingDir
from common.ranks.ranks import Ranks
from common.runs.folder import RunFolder, fsync_path, write_atomic
from common.runs.run_progress import RunProgress
from common.system.bounded_wait import mark_bounded_wait
from common.system.causes import Cause
from common.system.errors import CausedDiskError, RunTakenError, UserError
from common.system.text import format_count
from configs.shared import Checkpoint

MAX_NAMES_IN_MESSAGE = 10
RETRY_SECONDS = 0.5  # pause before a failed write is repeated
FACT_TYPES = str | int | float | bool | None  # values in `common` of these types are also in the manifest


@dataclass
class CheckpointState:
    """The part of a checkpoint that one rank saves.

    All values are tensors and primitives, or dicts, lists and tuples of tensors and primitives.
    """

    model: dict[str, Tensor]
    """Parameters and buffers by fully qualified name. The dicts of all ranks are merged when a checkpoint is loaded. If
    several ranks hold the same tensor, only the first of these ranks saves the tensor."""
    optimizer: dict[str, dict[str, Any]]
    """Optimizer state of each parameter, by fully qualified name, merged like `model` when a checkpoint is loaded."""
    common: dict[str, Any]
    """Values that are equal on all ranks, such as the epoch and the data position. Only rank 0 saves these values."""
    local: dict[str, Any] = field(default_factory=dict)
    """Values that are specific to this rank, such as its random states and its BatchNorm statistics."""


class Checkpointer:
    """Saves and loads the checkpoints of one run.

    All ranks must call each method after the same step.
    """

    def __init__(
        self,
        folder: RunFolder,
        ranks: Ranks,
        settings: Checkpoint,
        log_message: Callable[[str], None],
        find_stop_reason: Callable[[], str] = lambda: "",
        progress: RunProgress | None = None,
    ) -> None:
        """Create a checkpointer.

        `log_message` is called with messages for the user, which are identical on all ranks. `find_stop_reason` is
        called on rank 0 after a failed write, and returns the reason why the attempt must stop, or an empty string if
        the attempt may continue. `progress` records the saved steps.
        """
        self.folder = folder
        self.ranks = ranks
        self.settings = settings
        self.log_message = log_message
        self.find_stop_reason = find_stop_reason
        self.progress = progress or RunProgress()
        self.problem: WriteProblem | None = None
        """The reason why the newest checkpoint could not be written; None if the newest checkpoint was written."""
        self.deletion: threading.Thread | None = None

    # ---- saving

    def save(self, step: int, state: CheckpointState, *, best: bool = False) -> bool:
        """Save the state after `step` steps; return False if the checkpoint could not be written.

        If `best` is True, the checkpoint is kept until a better checkpoint is saved. The metrics up to this step must
        already be on disk. A write error is reported to the user but not raised, so that training can continue. Raises
        TypeError if the state contains a value that could not be loaded again. Raises ValueError if two ranks save a
        model tensor with the same name.
        """
        content = self._collect_rank_content(step, state)
        problem: WriteProblem | None = None
        for retries_left in range(self.settings.retries, -1, -1):
            # A checkpoint of the same step is not written twice, for example if the final model is also the best.
            problem = None if step == self.progress.saved_step else self._try_write_checkpoint(step, state, content)
            if problem is None:
                break
            if retries_left:
                time.sleep(RETRY_SECONDS)

        if problem is not None:
            self.report_failed_save(step, problem)
            return False
        if self.problem:
            self.log_message(f"checkpoint saved after step {step}; saving works again")
        self.problem = None
        self.progress.record_save(step, best=best)

        problem = self.run_on_main(self._update_pointers_and_delete_old)
        if problem is not None:
            self.log_message(f"WARNING: cannot update `latest` or delete old checkpoints: {problem.text}")
        return True

    def report_failed_save(self, step: int, problem: WriteProblem, *, is_known: bool = False) -> None:
        """Report that no checkpoint was written after a step.

        Only the first of several consecutive failures is logged. If `is_known` is True, the user has already been
        informed of the problem, and nothing is logged.
        """
        if not (self.problem or is_known):
            newest = (
                "this attempt has not saved any checkpoint yet"
                if self.progress.saved_step is None
                else f"the newest checkpoint is from step {self.progress.saved_step}"
            )
            self.log_message(
                f"WARNING: no checkpoint was saved for step {step}: {problem.text}; training continues ({newest})"
            )
        self.problem = problem

    def _collect_rank_content(self, step: int, state: CheckpointState) -> dict[str, Any]:
        """Return the content of this rank's checkpoint file."""
        world = self.ranks.current
        content: dict[str, Any] = {
            "step": step,
            "attempt": self.folder.number,
            "rank": world.rank,
            "processes": world.size,
        }
        for name, part in vars(state).items():
            is_saved = name != "common" or world.is_main
            content[name] = convert_to_plain_values(part, name) if is_saved else {}
        return content

    def _try_write_checkpoint(self, step: int, state: CheckpointState, content: dict[str, Any]) -> WriteProblem | None:
        """Try once to write and publish the files of all ranks; return None on success.

        On failure, return a description of the problem, which is the same on all ranks.
        """
        world = self.ranks.current
        self.wait_for_deletions()
        staging = StagingDir(self.folder, step)
        problem = self.run_on_main(staging.create)
        if problem is not None:
            return problem

        # Write the file of this rank.
        path = staging.path / storage.make_rank_file_name(world.rank)
        report: dict[str, Any]
        try:
            report = asdict(write_rank_file(path, content))
        except OSError as error:
            problem = WriteProblem.from_error(error)
            place = f"rank {world.rank} on {world.hosts[world.rank]}"
            report = {"problem": [f"{place}: {problem.text}", problem.cause]}

        # Each rank sends its manifest entry (or a problem) and the names of its model tensors to rank 0.
        reports = world.gather([report, list(state.model)])
        files: dict[str, ManifestEntry] = {}
        problems: list[WriteProblem] = []
        names: list[str] = []
        for rank, (rank_report, rank_names) in enumerate(reports):
            names += rank_names
            if "problem" in rank_report:
                text, cause = rank_report["problem"]
                problems.append(WriteProblem(text, Cause(cause)))
            else:
                entry = ManifestEntry(rank_report["bytes"], rank_report["sha256"])
                files[storage.make_rank_file_name(rank)] = entry

        duplicates = world.broadcast(len(names) - len(set(names)))
        if duplicates:
            self.run_on_main(staging.discard)
            raise ValueError(
                f"several ranks save the same model tensor (duplicate names: {duplicates}); each name must be saved by "
                "exactly one rank. If every rank holds the full model, pass replicated=True to run.register"
            )
        return self.run_on_main(lambda: self._publish_or_discard(staging, files, problems, state))

    def _publish_or_discard(
        self, staging: StagingDir, files: dict[str, ManifestEntry], problems: list[WriteProblem], state: CheckpointState
    ) -> None:
        """Publish the written files as a checkpoint, or delete the files if `problems` is not empty.

        Raises OSError if the checkpoint cannot be published, or RunTakenError if a newer attempt has started. Only rank
        0 calls this method.
        """
        try:
            if problems:
                raise CausedDiskError("; ".join(problem.text for problem in problems), cause=problems[0].cause)
            if self.folder.metrics_file.exists():
                fsync_path(self.folder.metrics_file)  # a resumed attempt does not write these rows again
            facts = {name: value for name, value in state.common.items() if isinstance(value, FACT_TYPES)}
            manifest = Manifest(staging.target.step, self.folder.number, self.ranks.current.size, files, facts)
            staging.publish(manifest)
        except (OSError, RunTakenError):
            staging.discard()
            raise

    def _update_pointers_and_delete_old(self) -> None:
        """Update the files `latest` and `best`, and delete old checkpoints. Only rank 0 calls this method."""
        assert self.progress.saved_step is not None
        try:
            self._write_pointer_file("latest", self.progress.saved_step)
            if self.progress.best_step is not None:
                self._write_pointer_file("best", self.progress.best_step)
        finally:
            old = storage.retire_old_checkpoints(self.folder, self.settings.keep, self.progress.best_step)
            if old:  # delete the files in a thread, so that training does not wait for the disk
                self.deletion = threading.Thread(target=storage.delete_folders, args=(old,))
                self.deletion.start()

    def _write_pointer_file(self, name: str, step: int) -> None:
        """Write the name of the checkpoint of a step to the file `latest` or `best`."""
        checkpoint = CheckpointPath(self.folder, step)
        write_atomic(checkpoint.path.with_name(name), f"{checkpoint.name}\n")

    @mark_bounded_wait()
    def wait_for_deletions(self) -> None:
        """Wait until the background thread has deleted old checkpoints."""
        if self.deletion is not None:
            self.deletion.join()

    def run_on_main(self, function: Callable[[], None]) -> WriteProblem | None:
        """Call `function` on rank 0 and return its disk problem on all ranks, or None on success.

        Raises RunTakenError on all ranks if another attempt has taken over the run, or if the folder of this attempt
        was deleted.
        """
        world = self.ranks.current
        problem: WriteProblem | None = None
        stop_reason = ""
        if world.is_main:
            try:
                function()
            except RunTakenError as error:
                stop_reason = str(error)
            except (OSError, UserError) as error:
                problem = WriteProblem.from_error(error)
                stop_reason = self.find_stop_reason()
        facts, stop_reason = world.broadcast([list(problem) if problem else None, stop_reason])
        if stop_reason:
            raise RunTakenError(stop_reason)
        return WriteProblem(facts[0], Cause(facts[1])) if facts else None

    def load(self, check: Callable[[LoadedCheckpoint], None] = lambda _: None) -> LoadedCheckpoint | None:
        """Load the newest valid checkpoint of the run.

        Returns None if the run has never saved a checkpoint; training then starts at step 0. `check` may raise
        UserError to reject the checkpoint. Raises UserError if the run has saved checkpoints but none of them is valid.
        """
        world = self.ranks.current
        resumable = storage.list_resumable_checkpoints(self.folder) if world.is_main else []
        positions = world.broadcast([[checkpoint.attempt.number, checkpoint.step] for checkpoint in resumable])
        candidates = [CheckpointPath(RunFolder(self.folder.path, attempt), step) for attempt, step in positions]
        problems: list[ReadProblem] = []
        for checkpoint in candidates:
            loaded, problem = try_read_checkpoint(checkpoint, world)
            if problem is None:
                break
            problems.append(problem)
            self.log_message(f"ignoring checkpoint {checkpoint}: {problem.text}")
        else:
            self._report_no_checkpoint(candidates, problems)
            return None
        assert loaded is not None
        check(loaded)
        if not loaded.resumes_exactly:
            self.log_message(
                f"the checkpoint was saved by {format_count(loaded.processes, 'rank')} and is resumed by "
                f"{world.size}: model, optimizer and data position are restored, but random states are not; "
                "results will match an uninterrupted run only up to rounding"
            )
        return loaded

    def _report_no_checkpoint(self, rejected: list[CheckpointPath], problems: list[ReadProblem]) -> None:
        """Report that no checkpoint can be loaded, and raise UserError if training must not start at step 0.

        A run that has saved checkpoints never restarts from step 0 by itself. Therefore UserError is raised if all
        checkpoints are invalid or missing. If the run has only incomplete checkpoints, their number is reported.
        `problems` contains the problem of each rejected checkpoint.
        """
        world = self.ranks.current
        lost = storage.list_lost_checkpoints(self.folder) if world.is_main and not rejected else []
        missing = world.broadcast([str(checkpoint) for checkpoint in lost])
        for name in missing:
            self.log_message(f"{name} is missing: the checkpoint folder was deleted")
        names = [str(checkpoint) for checkpoint in rejected] + missing
        if names:
            shortened = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
            if len(names) > MAX_NAMES_IN_MESSAGE:
                shortened += ", ..."
            if any(problem.is_permission_denied for problem in problems):
                from common.checkpoint import permissions  # imported here because most runs do not need it

                remedy = permissions.format_permission_remedy(self.folder)
                raise UserError(f"no checkpoint can be read ({shortened}); {remedy}")
            raise UserError(
                f"no valid checkpoint left ({shortened}); repair or restore one of them, or "
                f"delete {self.folder.path}/attempts/*/checkpoints to restart from step 0",
                cause=Cause.NO_VALID_CHECKPOINT,
            )
        staging_dirs = storage.list_staging_dirs(self.folder) if world.is_main else []
        half_written = world.broadcast(len(staging_dirs))
        if half_written:
            count = format_count(half_written, "incomplete checkpoint")
            self.log_message(f"ignoring {count}; no complete checkpoint exists")
