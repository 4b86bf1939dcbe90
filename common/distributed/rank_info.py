"""The position of a rank in its run, as torchrun, SLURM or the local launcher gives it. Imports no torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from common.core.errors import UserError

COORDINATOR = "ELASTIC_COORDINATOR"  # variable with the address of the coordinator of a job's elastic run
KEY = "ELASTIC_KEY"  # variable with the key that this coordinator asks for
ORPHANED = "ELASTIC_ORPHANED"  # variable with the command, as JSON, that a rank executes which cannot reach it any more
JOINS_AS = "ELASTIC_JOINS_AS"  # variable with the rank that a new process takes the place of
WAIT = 10.0  # seconds in which rank 0 says why all ranks refuse, and the launcher ends the others


@dataclass(frozen=True)
class RankInfo:
    """The position of one rank, known before it has joined the others."""

    rank: int = 0
    size: int = 1
    """Ranks of the run (torch: world size)."""
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this node."""
    node: int = 0
    nodes: int = 1
    launcher: str = "local"
    """local, torchrun or slurm."""
    master: str = ""
    """Where the ranks meet: a file (local), host:port (torchrun) or the host of rank 0 (slurm)."""
    attempt_id: str = ""
    """Identifier of this attempt of the job or torchrun; ports and keys of the store derive from it."""
    is_restart: bool = False
    """True if the job or torchrun has started a process in this position before."""
    coordinator: str = ""
    """Address of the coordinator of an elastic run: the path of a UNIX socket, or host:port."""
    joins: bool = False
    """True for a rank that was lost and joins the others while they train; until then it is alone."""
    launched_as: int = -1
    """Its rank when the run started, where that may be another now."""

    @property
    def number(self) -> int:
        """Rank at the start of the run, by which the files of a rank go."""
        return self.rank if self.launched_as < 0 else self.launched_as


def read_rank_info(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the position from the variables of torchrun or SLURM; None without either: ranks are then forked here.

    torchrun comes first: inside an allocation it is what the user asked for. A batch script or a shell of an allocation
    is no SLURM task: only srun's tasks count.
    """
    is_restart = any(environ.get(name, "0") != "0" for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        size, local_size = int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_WORLD_SIZE", "1"))
        return RankInfo(
            rank=int(environ["RANK"]),
            size=size,
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_size=local_size,
            node=int(environ.get("GROUP_RANK", "0")),
            nodes=max(1, size // local_size),
            launcher="torchrun",
            master=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
            attempt_id=environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            is_restart=is_restart,
        )
    if {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= environ.keys():
        size, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
        attempt = (environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT", "0"))
        coordinator = environ.get(COORDINATOR, "")
        if JOINS_AS in environ:
            return RankInfo(
                nodes=int(environ["SLURM_JOB_NUM_NODES"]),
                launcher="slurm",
                master=coordinator.rpartition(":")[0],
                coordinator=coordinator,
                joins=True,
                launched_as=int(environ[JOINS_AS]),
            )
        return RankInfo(
            rank=int(environ["SLURM_PROCID"]),
            size=size,
            local_rank=int(environ["SLURM_LOCALID"]),
            local_size=size // nodes,
            node=int(environ["SLURM_NODEID"]),
            nodes=nodes,
            launcher="slurm",
            master=parse_first_host(environ["SLURM_STEP_NODELIST"]),
            attempt_id=".".join(attempt),
            is_restart=is_restart,
            coordinator=coordinator,
        )
    return None


def parse_first_host(nodelist: str) -> str:
    """Return the first host of a SLURM list such as `node[03-07,9],gpu1`."""
    head, bracket, tail = nodelist.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    inside, _, suffix = tail.partition("]")
    number = inside.replace("-", ",").partition(",")[0]
    return head + number + suffix.partition(",")[0]


@contextlib.contextmanager
def report_refusal_once(rank_info: RankInfo | None) -> Iterator[None]:
    """Let one rank say what all of them refuse in the block, before they have met: rank 0, at once.

    The others wait, because the launcher ends all ranks when one has ended. One that is still there then has a reason
    of its own, and says it.
    """
    try:
        yield
    except UserError:
        if rank_info is not None and rank_info.rank:
            time.sleep(WAIT)
        raise
