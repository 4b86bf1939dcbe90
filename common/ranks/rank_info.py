"""Define the position of a rank in its run, and read this position from the variables of torchrun or SLURM.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from common.system.errors import UserError

# Environment variables of the ranks of an elastic job.
COORDINATOR_VARIABLE = "ELASTIC_COORDINATOR"  # address of the coordinator
COORDINATOR_KEY_VARIABLE = "ELASTIC_KEY"  # key with which a rank authenticates itself to the coordinator
ORPHAN_COMMAND_VARIABLE = (
    "ELASTIC_ORPHANED"  # command (JSON) that a rank executes when it can no longer reach the coordinator
)
REPLACED_RANK_VARIABLE = "ELASTIC_JOINS_AS"  # original rank of the process that a new process replaces

REFUSAL_DELAY_SECONDS = 10.0  # time that the other ranks wait for rank 0 to report an error that all ranks raise


@dataclass(frozen=True)
class RankInfo:
    """Position of one rank in its run, which is known before the ranks are connected."""

    rank: int = 0
    size: int = 1
    """Number of ranks in the run (the world size in torch)."""
    local_rank: int = 0
    local_size: int = 1
    """Number of ranks on this node."""
    nodes: int = 1
    launcher: str = "local"
    """Launcher that started the rank: local, torchrun, or slurm."""
    master: str = ""
    """Rendezvous address: a file (local), host:port (torchrun), or the host of rank 0 (slurm)."""
    attempt_id: str = ""
    """Identifier of this attempt, set by SLURM or torchrun. The store's ports and keys are derived from it."""
    is_restart: bool = False
    """True if SLURM or torchrun has restarted this rank."""
    coordinator: str = ""
    """Address of the coordinator of an elastic run: the path of a UNIX socket, or host:port."""
    is_joining: bool = False
    """True for a restarted rank that has not joined the other ranks yet and whose world therefore has size 1."""
    started_as_rank: int = -1
    """Rank number at the start of the run if this number may differ from `rank`; otherwise, -1."""

    @property
    def original_rank(self) -> int:
        """Rank number at the start of the run, which is used in the names of the rank's files."""
        return self.rank if self.started_as_rank < 0 else self.started_as_rank


def read_rank_info(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the position of this rank from the environment variables of torchrun or SLURM.

    Return None if the variables are not set. The variables of torchrun have priority, because users can start torchrun
    inside a SLURM allocation. Only processes that srun started count as SLURM ranks. The batch script and the
    interactive shell of an allocation do not. Raises UserError if the hosts have different numbers of ranks.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return read_torchrun_rank(environ)
    if not {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None
    if REPLACED_RANK_VARIABLE in environ:
        return read_rejoining_rank(environ)
    return read_slurm_rank(environ)


def read_torchrun_rank(environ: Mapping[str, str]) -> RankInfo:
    """Read the position of a rank that torchrun started. Raises UserError if hosts have different numbers of ranks."""
    size = int(environ["WORLD_SIZE"])
    local_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if size % local_size:
        raise UserError(
            f"torchrun started {size} ranks, of which {local_size} run on this host; use the same --nproc-per-node on "
            "all hosts"
        )
    return RankInfo(
        rank=int(environ["RANK"]),
        size=size,
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        local_size=local_size,
        nodes=max(1, size // local_size),
        launcher="torchrun",
        master=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        attempt_id=environ.get("TORCHELASTIC_RESTART_COUNT", ""),
        is_restart=is_restarted(environ),
    )


def read_slurm_rank(environ: Mapping[str, str]) -> RankInfo:
    """Read the position of a rank that srun started."""
    size = int(environ["SLURM_STEP_NUM_TASKS"])
    nodes = int(environ["SLURM_STEP_NUM_NODES"])
    return RankInfo(
        rank=int(environ["SLURM_PROCID"]),
        size=size,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_size=size // nodes,
        nodes=nodes,
        launcher="slurm",
        master=parse_first_host(environ["SLURM_STEP_NODELIST"]),
        attempt_id=f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}",
        is_restart=is_restarted(environ),
        coordinator=environ.get(COORDINATOR_VARIABLE, ""),
    )


def read_rejoining_rank(environ: Mapping[str, str]) -> RankInfo:
    """Read the position of a restarted rank of an elastic job."""
    coordinator = environ.get(COORDINATOR_VARIABLE, "")
    return RankInfo(
        nodes=int(environ["SLURM_JOB_NUM_NODES"]),
        launcher="slurm",
        master=coordinator.rpartition(":")[0],
        coordinator=coordinator,
        is_joining=True,
        started_as_rank=int(environ[REPLACED_RANK_VARIABLE]),
    )


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM or torchrun has restarted this process."""
    counters = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(environ.get(name, "0") != "0" for name in counters)


def parse_first_host(nodelist: str) -> str:
    """Return the first host of a SLURM host list such as `node[03-07,9],gpu1`."""
    head, bracket, tail = nodelist.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    ranges, _, suffix = tail.partition("]")
    number = ranges.replace("-", ",").partition(",")[0]
    return head + number + suffix.partition(",")[0]


@contextlib.contextmanager
def report_common_error_once(rank_info: RankInfo | None) -> Iterator[None]:
    """Let only rank 0 report a UserError that all ranks raise in the `with` block.

    The block runs before the rendezvous. When the error occurs, all ranks except rank 0 wait, so that rank 0 can report
    the error and exit, and the launcher can stop them. If a rank is still running after REFUSAL_DELAY_SECONDS, rank 0
    did not raise this error, so the waiting rank raises the error itself.
    """
    try:
        yield
    except UserError:
        if rank_info is not None and rank_info.rank:
            time.sleep(REFUSAL_DELAY_SECONDS)
        raise
