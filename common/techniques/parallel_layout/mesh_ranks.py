"""Ranks along one dimension of a mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshRanks:
    """The ranks that differ from this rank only in one dimension of the mesh."""

    mesh: DeviceMesh
    """Mesh with this dimension only."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the ranks."""
        return self.mesh.get_group()

    @property
    def index(self) -> int:
        """Index of this rank."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size()
