"""Two-dimensional mesh of ranks for replicated pipelines: pipeline parallel (pp) x data parallel (dp)."""

from __future__ import annotations

from common.ranks.rendezvous import World
from common.system.errors import UserError


def create_mesh_groups(world: World, replicas: int) -> tuple[World, World]:
    """Create the pipeline-parallel (pp) and data-parallel (dp) groups of this rank.

    The pp group contains all ranks of this rank's replica. The dp group contains the ranks that have the same pipeline
    position as this rank, one from each replica. Ranks are ordered by replica and then by pipeline position, so that
    each host holds complete replicas. All ranks must call this function. Raises UserError if the launcher has placed
    the stages of a replica on several hosts.
    """
    length = world.size // replicas
    replica, position = divmod(world.rank, length)
    for first in range(0, world.size, length):
        hosts = set(world.hosts[first : first + length])
        if replicas > 1 and len(hosts) > 1:
            raise UserError(
                f"replicas={replicas}: one replica has its stages on hosts {' and '.join(sorted(hosts))}; start a "
                f"multiple of {length} consecutive ranks on each host (srun --distribution=block)"
            )
    pipeline = world.make_subgroup(range(replica * length, (replica + 1) * length))
    return pipeline, world.make_subgroup(range(position, world.size, length))
