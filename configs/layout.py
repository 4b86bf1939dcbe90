"""Layout of a model on the ranks: degrees of tensor parallelism, sharding and replication."""

from __future__ import annotations

from dataclasses import dataclass

from configs.fields import at_least


@dataclass(frozen=True)
class Layout:
    """Degrees with which a model is divided among ranks. Their product is the number of ranks.

    The ranks form a mesh with the dimensions `replicas`, `fsdp` and `tensor`. Ranks that differ only in the position
    along `tensor` are neighbors and process the same samples.
    """

    tensor: int = at_least(1, 1)
    """Number of ranks that divide each matrix and each attention layer among themselves (tensor parallelism, arXiv
    1909.08053)."""
    sequence: bool = False
    """With tensor > 1, also divide the tokens of each sample between the matrices, so that a rank stores a part of
    these activations (sequence parallelism, arXiv 2205.05198)."""
    fsdp: int = at_least(1, 1)
    """Number of ranks among which parameters, gradients and optimizer state are sharded (fully_shard, arXiv 2304.11277).
    Each of these ranks processes other samples."""
    reshard: bool = True
    """With fsdp > 1, free the gathered parameters of a block after its forward pass, and gather them again for its
    backward pass. false keeps them, which needs more memory and less communication."""
    replicas: int = at_least(0, 0)
    """Number of replicas of the model, each of which processes other samples. 0 uses all remaining ranks."""

    def count_replicas(self, ranks: int) -> int:
        """Return the number of replicas of the model on `ranks` ranks."""
        return self.replicas or max(1, ranks // (self.tensor * self.fsdp))

    def count_shards(self, ranks: int) -> int:
        """Return the number of shards of each batch: one for each group of ranks that processes the same samples."""
        return self.count_replicas(ranks) * self.fsdp

    def check(self, ranks: int) -> None:
        """Raise ValueError if the degrees do not fit the number of ranks, or if a setting has no effect."""
        replicas = self.count_replicas(ranks)
        product = self.tensor * self.fsdp * replicas
        if product != ranks:
            degrees = f"tensor={self.tensor} x fsdp={self.fsdp} x replicas={replicas}"
            raise ValueError(f"{degrees} needs {product} ranks, but the run has {ranks}; use processes_per_node={product}"
                             " on one host, or change a degree")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true divides tokens among the ranks of tensor parallelism; use tensor=2 or more")
        if not self.reshard and self.fsdp == 1:
            raise ValueError("reshard=false concerns sharded parameters; use fsdp=2 or more, or omit reshard")
