"""Two-dimensional mesh of the ranks of replicated pipelines: pipeline parallel (pp) x data parallel (dp)."""

from __future__ import annotations

from common.core.errors import UserError
from common.distributed.rendezvous import World


def create_mesh_groups(world: World, replicas: int) -> tuple[World, World]:
    """Create this rank's groups: the pipeline of its replica (pp), and the same position in all replicas (dp).

    Ranks are ordered by replica, then along its pipeline, so that a host holds complete replicas. All ranks call it.
    Raises UserError if the launcher has placed the stages of a replica on several hosts.
    """
    length = world.size // replicas
    replica, position = divmod(world.rank, length)
    for first in range(0, world.size, length):
        hosts = set(world.hosts[first : first + length])
        if replicas > 1 and len(hosts) > 1:
            raise UserError(
                f"replicas={replicas}: the stages of one replica are on {' and '.join(sorted(hosts))}; start a "
                f"multiple of {length} ranks on each host, in blocks (srun --distribution=block)"
            )
    pipeline = world.make_subgroup(range(replica * length, (replica + 1) * length))
    return pipeline, world.make_subgroup(range(position, world.size, length))
