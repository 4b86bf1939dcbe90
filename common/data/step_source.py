"""Interface of the objects that a run iterates over, one item per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class StepSource(Protocol):
    """Source of the items of a run: the batches of a `Loader`, or the points of a measurement.

    Iterating yields the remaining items of the current epoch, and then moves to the start of the next epoch.
    """

    @property
    def steps(self) -> int:
        """Number of steps in an epoch."""

    @property
    def mean_shard(self) -> float:
        """Mean number of samples per rank in the newest item."""

    @property
    def shard_weight(self) -> float:
        """Number of samples of this rank in a full item, divided by the number in an equal shard."""

    @property
    def local_samples_if_unequal(self) -> int | None:
        """Number of samples of this rank in a full item, or None if the shards are equal."""

    def count_samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` steps of a run, over all ranks."""

    def state_dict(self) -> dict[str, int]:
        """Return the current epoch and the position in it."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to the epoch and position in `state`."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining items of the current epoch."""
