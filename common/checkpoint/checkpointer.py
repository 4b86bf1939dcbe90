"""Checkpoints that are whole or not there: every process writes its file, and one rename makes them a checkpoint.

What is saved is on the disk before it counts, and what is loaded is compared with the checksums that were taken while
it was written. All processes agree: a checkpoint that one of them cannot write or read is none for all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from common.checkpoint import storage
from common.checkpoint.rank_file import decode_rank_file, write_rank_file
from common.checkpoint.state_dicts import to_plain
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint, Manifest, ManifestEntry, StagingDir
from common.core.errors import NO_VALID_CHECKPOINT, UserError, first_line
from common.distributed.rendezvous import World
from common.runs.folder import Folder, fsync_path, write_atomic
from configs.shared import Checkpoint

PAUSE = 0.5  # seconds before another try
FACTS = str | int | float | bool


@dataclass
class CheckpointState:
    """What one process gives to a checkpoint: tensors, primitives, and dicts, lists and tuples of them."""

    model: dict[str, Tensor]
    """Parameters and buffers by their full names in the whole model. The processes' dicts are united: what several
    hold alike, only rank 0 gives."""
    optimizer: dict[str, dict[str, Any]]
    """What the optimizer remembers of each parameter, by full names; united likewise."""
    common: dict[str, Any]
    """What is the same in all processes: epoch, place in the data, ... Rank 0's is kept."""
    local: dict[str, Any] = field(default_factory=dict)
    """What is this process's own: random states, BatchNorm's statistics, ..."""


@dataclass
class LoadedCheckpoint:
    """A checkpoint as one process gets it."""

    step: int
    attempt: int
    """The attempt that saved it."""
    processes: int
    """How many saved it."""
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    common: dict[str, Any]
    local: dict[str, Any] | None
    """This process's own part; None if another number of processes saved it."""

    @property
    def exact(self) -> bool:
        """Whether training goes on to the bit as if it had not been interrupted."""
        return self.local is not None


class Checkpointer:
    """The checkpoints of one run. All processes call the methods, at the same step.

    `say` gets what people should know, the same words in all processes.
    """

    def __init__(self, folder: Folder, world: World, settings: Checkpoint, say: Callable[[str], None]) -> None:
        self.folder, self.world, self.settings, self.say = folder, world, settings, say
        self.saved: int | None = None
        self.best: int | None = None
        self.sweeper: threading.Thread | None = None

    # ---- saving

    def save(self, step: int, state: CheckpointState, *, best: bool = False) -> bool:
        """Save the state after `step` steps; with `best` it is kept until a better one comes.

        Rows of metrics up to this step must have been written. False if the disk does not take it: that is said, and
        training can go on. Raises TypeError for what cannot be read again, ValueError if two ranks give one name.
        """
        content = self._content(step, state)
        problem: str | None = None
        for left in range(self.settings.retries, -1, -1):
            problem = None if step == self.saved else self._write(step, state, content)
            if problem is None:
                break
            if left:
                time.sleep(PAUSE)
        if problem is not None:
            older = "there is no older one of this start" if self.saved is None else f"the last is of step {self.saved}"
            self.say(f"WARNING: no checkpoint of step {step}: {problem}; training goes on, {older}")
            return False
        self.saved, self.best = step, step if best else self.best
        problem = self._on_main(self._tidy)
        if problem is not None:
            self.say(f"WARNING: old checkpoints could not be removed: {problem}")
        return True

    def _content(self, step: int, state: CheckpointState) -> dict[str, Any]:
        """What this process writes."""
        place = {"step": step, "attempt": self.folder.number}
        place |= {"rank": self.world.rank, "processes": self.world.size}
        parts = {"model": state.model, "optimizer": state.optimizer, "local": state.local}
        parts["common"] = state.common if self.world.is_main else {}
        return place | {name: to_plain(value, name) for name, value in parts.items()}

    def _write(self, step: int, state: CheckpointState, content: dict[str, Any]) -> str | None:
        """One try by all processes; returns what went wrong, the same everywhere."""
        self.close()
        staging = StagingDir(self.folder, step)
        problem = self._on_main(staging.begin)
        if problem is not None:
            return problem
        written: ManifestEntry | str
        try:
            written = write_rank_file(staging.path / storage.rank_file_name(self.world.rank), content)
        except OSError as error:
            written = f"rank {self.world.rank} on {self.world.hosts[self.world.rank]}: {first_line(error)}"
        answers = self.world.gather((written, list(state.model)))
        names = [name for _, given in answers for name in given]
        twice = self.world.broadcast(len(names) - len(set(names)))
        problem = self._on_main(lambda: self._commit(staging, [answer for answer, _ in answers], state, bool(twice)))
        if twice:
            raise ValueError(f"ranks give {twice} names of the model more than once; only rank 0 gives what all hold")
        return problem

    def _commit(
        self, staging: StagingDir, entries: list[ManifestEntry | str], state: CheckpointState, void: bool
    ) -> None:
        """Rank 0 makes the written files a checkpoint, or removes them."""
        try:
            failed = [entry for entry in entries if isinstance(entry, str)]
            if failed or void:
                raise OSError("; ".join(failed))
            if self.folder.metrics_file.exists():
                fsync_path(self.folder.metrics_file)  # rows that the next attempt will not write again
            files = {
                storage.rank_file_name(i): entry for i, entry in enumerate(entries) if isinstance(entry, ManifestEntry)
            }
            facts = {name: value for name, value in state.common.items() if isinstance(value, FACTS | None)}
            staging.commit(Manifest(staging.target.step, self.folder.number, self.world.size, files, facts))
        except OSError:
            staging.discard()
            raise

    def _tidy(self) -> None:
        """Rank 0 moves the pointers and removes what is no longer needed."""
        assert self.saved is not None
        try:
            for name, step in (("latest", self.saved), ("best", self.best)):
                if step is not None:
                    place = CheckpointPath(self.folder, step)
                    write_atomic(place.path.with_name(name), place.name + "\n")
        except UserError as error:
            raise OSError(str(error)) from error
        finally:
            old = storage.prune_checkpoints(self.folder, self.settings.keep, self.best)
            if old:  # nobody waits while the disk frees their blocks
                self.sweeper = threading.Thread(target=storage.delete_folders, args=(old,))
                self.sweeper.start()

    def close(self) -> None:
        """Wait until old checkpoints are gone."""
        if self.sweeper is not None:
            self.sweeper.join()

    def _on_main(self, work: Callable[[], None]) -> str | None:
        """Rank 0 does it; all learn what went wrong."""
        problem: str | None = None
        if self.world.is_main:
            try:
                work()
            except OSError as error:
                problem = first_line(error)
        return self.world.broadcast(problem)

    # ---- loading

    def load(self) -> LoadedCheckpoint | None:
        """The newest sound state of the run; None where there is none to continue, and training starts anew.

        Raises UserError if there are checkpoints and none of them is sound.
        """
        found = iter(storage.list_candidates(self.folder) if self.world.is_main else ())
        rejected = 0
        while True:
            choice, complaints = self.world.broadcast(choose_manifest(found) if self.world.is_main else None)
            for complaint in complaints:
                self.say(complaint)
            rejected += len(complaints)
            if choice is None:
                self._none(rejected)
                return None
            loaded, problem = self._try(choice)
            # before any process uses it, each must have it
            problem = self.world.broadcast(merge_problems(self.world.gather(problem), self.world))
            if problem is None:
                break
            rejected += 1
            self.say(f"{CheckpointPath(Folder(self.folder.path, choice.attempt), choice.step)} is not used: {problem}")
        assert loaded is not None
        if not loaded.exact:
            self.say(
                f"{loaded.processes} processes saved this, {self.world.size} go on: model, optimizer and place in the "
                "data are the same; random streams begin anew, and sums are rounded in another order"
            )
        return loaded

    def _try(self, manifest: Manifest) -> tuple[LoadedCheckpoint | None, str | None]:
        """The checkpoint as this process reads it, or why it cannot."""
        place = CheckpointPath(Folder(self.folder.path, manifest.attempt), manifest.step)
        try:
            return read_checkpoint(place, manifest, self.world), None
        except InvalidCheckpoint as reason:
            return None, str(reason)

    def _none(self, rejected: int) -> None:
        """Nothing could be loaded: start anew if nothing was there, else refuse."""
        if rejected:
            raise UserError(
                f"none of the {rejected} checkpoints of {self.folder.path} {NO_VALID_CHECKPOINT}; repair one, or "
                f"remove {self.folder.path}/attempts/*/checkpoints to train from the beginning"
            )
        left = self.world.broadcast(len(storage.list_unfinished(self.folder)) if self.world.is_main else 0)
        if left:
            self.say(f"{left} half-written checkpoint{'s are' if left > 1 else ' is'} not used, and there is no other")


def choose_manifest(found: Iterator[CheckpointPath]) -> tuple[Manifest | None, list[str]]:
    """The next checkpoint with a sound manifest, and what is wrong with those before it."""
    complaints: list[str] = []
    for snapshot in found:
        try:
            return storage.read_manifest(snapshot), complaints
        except InvalidCheckpoint as reason:
            complaints.append(f"{snapshot} is not used: {reason}")
    return None, complaints


def read_checkpoint(place: CheckpointPath, manifest: Manifest, world: World) -> LoadedCheckpoint:
    """Read all files of a checkpoint and put them together. Raises InvalidCheckpoint."""
    loaded = LoadedCheckpoint(manifest.step, manifest.attempt, manifest.processes, {}, {}, {}, None)
    for rank in range(manifest.processes):
        part = decode_rank_file(storage.read_verified(place, manifest, rank), storage.rank_file_name(rank))
        where = [part.get(name) for name in ("step", "attempt", "rank", "processes")]
        if where != [manifest.step, manifest.attempt, rank, manifest.processes]:
            raise InvalidCheckpoint(
                "{} is that of step {}, attempt {}, rank {} of {}".format(storage.rank_file_name(rank), *where)
            )
        loaded.model |= part["model"]
        loaded.optimizer |= part["optimizer"]
        loaded.common |= part["common"]
        if rank == world.rank and manifest.processes == world.size:
            loaded.local = part["local"]
    return loaded


def read_full_model(place: CheckpointPath) -> dict[str, Tensor]:
    """The whole model in a checkpoint: all stages, shards and replicas joined. Raises InvalidCheckpoint."""
    manifest, model = storage.read_manifest(place), dict[str, Tensor]()
    for rank in range(manifest.processes):
        model |= decode_rank_file(storage.read_verified(place, manifest, rank), storage.rank_file_name(rank))["model"]
    return model


def merge_problems(problems: list[str | None], world: World) -> str | None:
    """What is wrong in any process; the first is named if not all find the same."""
    if len(set(problems)) < 2:
        return problems[0] if problems else None
    rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem is not None)
    return f"rank {rank} on {world.hosts[rank]} finds: {problem}"
