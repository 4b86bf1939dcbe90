"""Atomic checkpoints: one file per rank, published by a single rename.

A checkpoint is on the disk before it is published, and what is loaded is compared with the checksums taken while it was
written. All ranks agree: a checkpoint that one of them cannot write or read is invalid for all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from common.checkpoint import storage
from common.checkpoint.rank_file import read_rank_file, write_rank_file
from common.checkpoint.state_dicts import to_plain
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint, Manifest, ManifestEntry, StagingDir
from common.core.errors import NO_VALID_CHECKPOINT, RunTaken, UserError, summarize_error
from common.core.text import format_count
from common.distributed.rendezvous import World
from common.runs.folder import Folder, fsync_path, write_atomic
from configs.shared import Checkpoint

MAX_NAMES = 10  # of checkpoints in a message
PAUSE = 0.5  # seconds before another attempt to write
FACT = str | int | float | bool | None  # type of a common value that the manifest repeats


@dataclass
class CheckpointState:
    """Content of a checkpoint from one rank: tensors, primitives, and dicts, lists and tuples of them."""

    model: dict[str, Tensor]
    """Parameters and buffers by fully qualified name. The dicts of all ranks are merged: a tensor that several hold,
    only the first of them gives."""
    optimizer: dict[str, dict[str, Any]]
    """Optimizer state of each parameter by fully qualified name; merged likewise."""
    common: dict[str, Any]
    """Values that are equal on all ranks: epoch, data position, ... Rank 0's are saved."""
    local: dict[str, Any] = field(default_factory=dict)
    """Values of this rank alone: random states, BatchNorm's statistics, ..."""


@dataclass
class LoadedCheckpoint:
    """A checkpoint as one rank loads it."""

    step: int
    attempt: int
    """The attempt that saved it."""
    processes: int
    """Ranks that saved it."""
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    common: dict[str, Any]
    local: dict[str, Any] | None
    """This rank's own part; None if another number of ranks saved it."""

    @property
    def resumes_exactly(self) -> bool:
        """True if resumed training equals uninterrupted training to the bit."""
        return self.local is not None


class Checkpointer:
    """Saver and loader of the checkpoints of one run. All ranks call its methods, at the same step.

    `log_message` receives messages for the user, the same on all ranks.
    """

    def __init__(
        self,
        folder: Folder,
        world: World,
        settings: Checkpoint,
        log_message: Callable[[str], None],
        find_loss: Callable[[], str] = lambda: "",
    ) -> None:
        """`find_loss` says, on rank 0, why the attempt must stop after a failure to write; empty where it may go on."""
        self.find_loss = find_loss
        self.folder, self.world, self.settings, self.log_message = folder, world, settings, log_message
        self.saved: int | None = None
        """Step of the newest checkpoint of this attempt."""
        self.best: int | None = None
        """Step of the best one."""
        self.problem = ""
        """Why the newest checkpoint could not be written; empty after one that could."""
        self.sweeper: threading.Thread | None = None

    # ---- saving

    def save(self, step: int, state: CheckpointState, *, best: bool = False) -> bool:
        """Save the state after `step` steps; with `best` it is kept until a better one is saved.

        Rows of metrics up to this step must have been written. Returns False if the disk refuses: that is reported, and
        training can go on. Raises TypeError for a value that could not be loaded again, ValueError if two ranks give
        one name.
        """
        content = self._collect_rank_content(step, state)
        problem: str | None = None
        for left in range(self.settings.retries, -1, -1):
            problem = None if step == self.saved else self._try_write(step, state, content)
            if problem is None:
                break
            if left:
                time.sleep(PAUSE)
        if problem is not None:
            self.report_refusal(step, problem)
            return False
        if self.problem:
            self.log_message(f"checkpoints are written again, after step {step}")
        self.problem = ""
        self.saved, self.best = step, step if best else self.best
        problem = self._run_on_main(self._remove_old)
        if problem is not None:
            self.log_message(f"WARNING: old checkpoints could not be removed: {problem}")
        return True

    def report_refusal(self, step: int, problem: str, *, is_known: bool = False) -> None:
        """Report that no checkpoint was written after a step: the first of several in a row, unless it `is_known`."""
        if not (self.problem or is_known):
            older = "this attempt has no older one" if self.saved is None else f"the last is of step {self.saved}"
            self.log_message(f"WARNING: no checkpoint of step {step}: {problem}; training goes on, {older}")
        self.problem = problem

    def _collect_rank_content(self, step: int, state: CheckpointState) -> dict[str, Any]:
        """Return the content of this rank's file."""
        origin = {"step": step, "attempt": self.folder.number, "rank": self.world.rank, "processes": self.world.size}
        parts = vars(state) | ({} if self.world.is_main else {"common": {}})
        return origin | {name: to_plain(value, name) for name, value in parts.items()}

    def _try_write(self, step: int, state: CheckpointState, content: dict[str, Any]) -> str | None:
        """Try once on all ranks; return the problem, the same on all, or None."""
        self.wait_for_deletions()
        staging = StagingDir(self.folder, step)
        problem = self._run_on_main(staging.create)
        if problem is not None:
            return problem
        written: ManifestEntry | str
        try:
            written = write_rank_file(staging.path / storage.make_rank_file_name(self.world.rank), content)
        except OSError as error:
            written = f"rank {self.world.rank} on {self.world.hosts[self.world.rank]}: {summarize_error(error)}"
        answer = written if isinstance(written, str) else asdict(written)
        answers = self.world.gather([answer, list(state.model)])
        names = [name for _, given in answers for name in given]
        twice = self.world.broadcast(len(names) - len(set(names)))
        entries = [given if isinstance(given, str) else ManifestEntry(**given) for given, _ in answers]
        problem = self._run_on_main(lambda: self._publish_or_discard(staging, entries, state, bool(twice)))
        if twice:
            raise ValueError(f"ranks give {twice} names of the model more than once; only rank 0 gives what all hold")
        return problem

    def _publish_or_discard(
        self, staging: StagingDir, entries: list[ManifestEntry | str], state: CheckpointState, void: bool
    ) -> None:
        """Publish the written files as a checkpoint, or delete them; rank 0 calls it."""
        try:
            failed = [entry for entry in entries if isinstance(entry, str)]
            if failed or void:
                raise OSError("; ".join(failed))
            if self.folder.metrics_file.exists():
                fsync_path(self.folder.metrics_file)  # rows that the next attempt will not write again
            files = {
                storage.make_rank_file_name(i): entry
                for i, entry in enumerate(entries)
                if isinstance(entry, ManifestEntry)
            }
            facts = {name: value for name, value in state.common.items() if isinstance(value, FACT)}
            staging.publish(Manifest(staging.target.step, self.folder.number, self.world.size, files, facts))
        except (OSError, RunTaken):
            staging.discard()
            raise

    def _remove_old(self) -> None:
        """Update the pointers and delete old checkpoints; rank 0 calls it."""
        assert self.saved is not None
        try:
            for name, step in (("latest", self.saved), ("best", self.best)):
                if step is not None:
                    checkpoint = CheckpointPath(self.folder, step)
                    write_atomic(checkpoint.path.with_name(name), f"{checkpoint.name}\n")
        except UserError as error:
            raise OSError(str(error)) from error
        finally:
            old = storage.retire_old_checkpoints(self.folder, self.settings.keep, self.best)
            if old:  # nobody waits while the disk frees their blocks
                self.sweeper = threading.Thread(target=storage.delete_folders, args=(old,))
                self.sweeper.start()

    def wait_for_deletions(self) -> None:
        """Wait until old checkpoints are deleted."""
        if self.sweeper is not None:
            self.sweeper.join()

    def _run_on_main(self, work: Callable[[], None]) -> str | None:
        """Call `work` on rank 0; return its problem or None on all ranks.

        Raises RunTaken on all ranks where another attempt has the run, or the attempt's folder is gone.
        """
        problem: str | None = None
        loss = ""
        if self.world.is_main:
            try:
                work()
            except RunTaken as error:
                loss = str(error)
            except OSError as error:
                problem = summarize_error(error)
                loss = self.find_loss()
        problem, loss = self.world.broadcast([problem, loss])
        if loss:
            raise RunTaken(loss)
        return problem

    # ---- loading

    def load(self, check: Callable[[LoadedCheckpoint], None] = lambda _: None) -> LoadedCheckpoint | None:
        """Load the newest valid checkpoint of the run; None where there is none, and training starts at step 0.

        `check` may refuse it by a UserError. Raises UserError if there are checkpoints, or were, and none is valid.
        """
        found = storage.list_resumable_checkpoints(self.folder) if self.world.is_main else []
        candidates = self.world.broadcast([[checkpoint.attempt.number, checkpoint.step] for checkpoint in found])
        for number, step in candidates:
            checkpoint = CheckpointPath(Folder(self.folder.path, number), step)
            loaded, problem = self._try_read(checkpoint)
            if problem is None:
                break
            self.log_message(f"{checkpoint} is not used: {problem}")
        else:
            self._report_no_checkpoint([CheckpointPath(Folder(self.folder.path, a), step) for a, step in candidates])
            return None
        assert loaded is not None
        check(loaded)
        if not loaded.resumes_exactly:
            self.log_message(
                f"saved by {format_count(loaded.processes, 'rank')}, resumed by {self.world.size}: model, optimizer "
                "and data position are restored; random states are not, and results match only to rounding"
            )
        return loaded

    def _try_read(self, checkpoint: CheckpointPath) -> tuple[LoadedCheckpoint | None, str | None]:
        """Return a checkpoint as this rank reads it, and why it is invalid, the same on all ranks, or None."""
        content, loaded, problem = None, None, None
        try:
            content = asdict(storage.read_manifest(checkpoint)) if self.world.is_main else None
        except InvalidCheckpoint as reason:
            problem = str(reason)
        content, problem = self.world.broadcast([content, problem])
        if content is None:
            return None, problem
        manifest = Manifest.from_content(content)
        try:
            loaded = read_checkpoint(checkpoint, manifest, self.world)
        except InvalidCheckpoint as reason:
            problem = str(reason)
        # before any rank uses it, each must have it
        return loaded, self.world.broadcast(describe_first_problem(self.world.gather(problem), self.world))

    def _report_no_checkpoint(self, rejected: list[CheckpointPath]) -> None:
        """Report half-written checkpoints where there never was a complete one.

        Raises UserError where all were rejected, or are lost: a run does not begin anew by itself.
        """
        lost = storage.list_lost_checkpoints(self.folder) if self.world.is_main and not rejected else []
        missing = self.world.broadcast([str(checkpoint) for checkpoint in lost])
        for name in missing:
            self.log_message(f"{name} is missing: its folder was deleted")
        names = [str(checkpoint) for checkpoint in rejected] + missing
        if names:
            named = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
            raise UserError(
                f"{NO_VALID_CHECKPOINT} ({named}); repair one or bring it back, or "
                f"remove {self.folder.path}/attempts/*/checkpoints to train from the beginning"
            )
        left = self.world.broadcast(len(storage.list_staging_dirs(self.folder)) if self.world.is_main else 0)
        if left:
            self.log_message(f"not used: {format_count(left, 'half-written checkpoint')}; there is no complete one")


def read_checkpoint(checkpoint: CheckpointPath, manifest: Manifest, world: World) -> LoadedCheckpoint:
    """Read and merge the files of all ranks. Raises InvalidCheckpoint."""
    loaded = LoadedCheckpoint(manifest.step, manifest.attempt, manifest.processes, {}, {}, {}, None)
    for rank in range(manifest.processes):
        part = read_rank_file(checkpoint, manifest, rank)
        where = [part.get(name) for name in ("step", "attempt", "rank", "processes")]
        if where != [manifest.step, manifest.attempt, rank, manifest.processes]:
            raise InvalidCheckpoint(
                "{} is that of step {}, attempt {}, rank {} of {}".format(storage.make_rank_file_name(rank), *where)
            )
        loaded.model |= part["model"]
        loaded.optimizer |= part["optimizer"]
        loaded.common |= part["common"]
        if rank == world.rank and manifest.processes == world.size:
            loaded.local = part["local"]
    return loaded


def read_full_model(checkpoint: CheckpointPath) -> dict[str, Tensor]:
    """Return the full model in a checkpoint, by name: all stages, shards and replicas. Raises InvalidCheckpoint."""
    manifest, model = storage.read_manifest(checkpoint), dict[str, Tensor]()
    for rank in range(manifest.processes):
        model |= read_rank_file(checkpoint, manifest, rank)["model"]
    return model


def describe_first_problem(problems: list[str | None], world: World) -> str | None:
    """Return the problem that any rank found; the first such rank is named if not all found the same."""
    if len(set(problems)) < 2:
        return problems[0] if problems else None
    rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem is not None)
    return f"rank {rank} on {world.hosts[rank]} finds: {problem}"
