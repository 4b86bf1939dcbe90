"""The 2-D mesh of ranks that pipelines with replicas need: pipeline parallel (pp) x data parallel (dp)."""

from __future__ import annotations

from common.core.errors import UserError
from common.distributed.rendezvous import World


def create_mesh_groups(world: World, replicas: int) -> tuple[World, World]:
    """Create this rank's two groups: its replica's pipeline (pp), and the same stages of all replicas (dp).

    Ranks are ordered replica by replica, and in each along its pipeline, so that a host holds complete replicas. All
    ranks call it. Raises UserError where a launcher has spread the ranks in another way.
    """
    length = world.size // replicas
    replica, position = divmod(world.rank, length)
    spread = {tuple(sorted(set(world.hosts[first : first + length]))) for first in range(0, world.size, length)}
    torn = sorted(hosts for hosts in spread if len(hosts) > 1)
    if replicas > 1 and torn:
        raise UserError(
            f"replicas={replicas}: a replica's stages are on {' and '.join(torn[0])}; start a "
            f"multiple of {length} ranks on each host, in blocks (srun --distribution=block)"
        )
    pipeline = world.make_subgroup(range(replica * length, (replica + 1) * length))
    return pipeline, world.make_subgroup(range(position, world.size, length))
