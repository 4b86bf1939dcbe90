"""The microbatches whose gradients one optimizer step adds up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from common.data.loader import Loader


class AccumulationLoader:
    """A loader's batches in lists of `count`, the microbatches of one optimizer step, from any position on.

    If the number of batches in an epoch is no multiple of `count`, its last list is shorter. The state is the loader's;
    between two lists it is that of an optimizer step. A pipeline's engine makes its microbatches itself
    (`PipelineEngine.step`); all their sizes are in `configs.batch_plan`.
    """

    def __init__(self, loader: Loader, count: int) -> None:
        self.loader, self.count = loader, count

    @property
    def steps(self) -> int:
        """Number of optimizer steps in an epoch."""
        return -(-self.loader.steps // self.count)

    def count_samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` optimizer steps, over all ranks."""
        epochs, rest = divmod(steps, self.steps)
        return (epochs * self.loader.steps + rest * self.count) * self.loader.batch

    def list_positions(self, step: int) -> list[range]:
        """Return the positions in the epoch of this rank's samples of a step, from 0, of each microbatch."""
        first, end = step * self.count, min((step + 1) * self.count, self.loader.steps)
        return [positions for batch in range(first, end) for positions in self.loader.list_positions(batch)]

    def state_dict(self) -> dict[str, int]:
        """Return the loader's epoch and position."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position, also between two lists."""
        self.loader.load_state_dict(state)

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each rank in a microbatch."""
        return self.loader.counts

    @property
    def own_samples(self) -> int:
        """Samples of this rank in a microbatch."""
        return self.loader.own_samples

    @property
    def mean_shard(self) -> float:
        """Samples of a microbatch, over all ranks, by the number of ranks."""
        return self.loader.mean_shard

    @property
    def weight(self) -> float:
        """Samples of this rank in a microbatch by those of an equal shard."""
        return self.loader.weight

    def set_shards(self, rank: int, counts: Sequence[int]) -> None:
        """Cut microbatches from the next list on by `counts`, as `Loader.set_shards` does."""
        self.loader.set_shards(rank, counts)

    def __iter__(self) -> Iterator[list[tuple[Any, Any]]]:
        """Yield the rest of the current epoch; at its end the next epoch begins."""
        source, loader = iter(self.loader), self.loader
        while (left := loader.steps - loader.position // loader.batch) > 0:
            yield list(itertools.islice(source, min(self.count, left)))
        next(source, None)  # not before the last microbatches were used: here the loader turns to the next epoch
