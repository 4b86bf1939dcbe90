"""Reading of a checkpoint by all ranks, which accept or reject the checkpoint together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from common.checkpoint import storage
from common.checkpoint.rank_file import read_rank_file
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint, Manifest, UnreadableCheckpoint
from common.ranks.rendezvous import World


@dataclass
class LoadedCheckpoint:
    """The content of a checkpoint as loaded by one rank."""

    step: int
    attempt: int
    """Number of the attempt that saved the checkpoint."""
    processes: int
    """Number of ranks that saved the checkpoint."""
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    common: dict[str, Any]
    local: dict[str, Any] | None
    """The local values of this rank, or None if the checkpoint was saved by a different number of ranks."""

    @property
    def resumes_exactly(self) -> bool:
        """True if resumed training reproduces uninterrupted training bit for bit."""
        return self.local is not None


class ReadProblem(NamedTuple):
    """Why a checkpoint cannot be loaded."""

    text: str
    is_permission_denied: bool

    @classmethod
    def from_error(cls, error: InvalidCheckpoint) -> ReadProblem:
        """Describe why this rank cannot read a checkpoint."""
        return cls(str(error), isinstance(error, UnreadableCheckpoint))


def try_read_checkpoint(checkpoint: CheckpointPath, world: World) -> tuple[LoadedCheckpoint | None, ReadProblem | None]:
    """Read a checkpoint on all ranks; return the content loaded by this rank, and a problem.

    The problem is the same on all ranks. It is None if all ranks have read the checkpoint.
    """
    content: dict[str, Any] | None = None
    problem: ReadProblem | None = None
    try:
        if world.is_main:
            content = asdict(storage.read_manifest(checkpoint))
    except InvalidCheckpoint as error:
        problem = ReadProblem.from_error(error)
    content, facts = world.broadcast([content, list(problem) if problem else None])
    if content is None:
        return None, ReadProblem(*facts)
    manifest = Manifest.from_content(content)

    loaded: LoadedCheckpoint | None = None
    try:
        loaded = read_checkpoint(checkpoint, manifest, world)
    except InvalidCheckpoint as error:
        problem = ReadProblem.from_error(error)
    # A rank may use the checkpoint only after all ranks have read it successfully.
    reports = world.all_gather(list(problem) if problem else None)
    problems = [ReadProblem(*facts) if facts else None for facts in reports]
    return loaded, find_first_problem(problems, world)


def read_checkpoint(checkpoint: CheckpointPath, manifest: Manifest, world: World) -> LoadedCheckpoint:
    """Read and merge the files of all ranks in a checkpoint. Raises InvalidCheckpoint if a file is invalid."""
    loaded = LoadedCheckpoint(manifest.step, manifest.attempt, manifest.processes, {}, {}, {}, None)
    for rank in range(manifest.processes):
        part = read_rank_file(checkpoint, manifest, rank)
        origin = [part.get(name) for name in ("step", "attempt", "rank", "processes")]
        if origin != [manifest.step, manifest.attempt, rank, manifest.processes]:
            raise InvalidCheckpoint(
                "{} belongs to step {}, attempt {}, rank {} of {}".format(storage.make_rank_file_name(rank), *origin)
            )
        loaded.model |= part["model"]
        loaded.optimizer |= part["optimizer"]
        loaded.common |= part["common"]
        if rank == world.rank and manifest.processes == world.size:
            loaded.local = part["local"]
    return loaded


def find_first_problem(problems: list[ReadProblem | None], world: World) -> ReadProblem | None:
    """Return the problem that all ranks report, or None if no rank reports a problem.

    If the ranks report different problems, or only some ranks report a problem, the text of the first problem also
    names its rank and host.
    """
    if len(set(problems)) == 1:
        return problems[0]
    rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem is not None)
    return problem._replace(text=f"rank {rank} on {world.hosts[rank]} reports: {problem.text}")
