"""Points of a measurement, such as message sizes, which a run measures in several rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class MeasurementPoints(Generic[T]):
    """Source of the points of a measurement (see `StepSource`).

    Each step measures one point, and each epoch is a round over all points. The attributes `epoch` and `position`
    (number of points of this round that have been returned) are the entire state of the iteration.
    """

    points: Sequence[T]

    def __post_init__(self) -> None:
        self.epoch = 0
        self.position = 0

    @property
    def steps(self) -> int:
        """Number of points in a round."""
        return len(self.points)

    @property
    def mean_shard(self) -> float:
        """All ranks measure the same point, so a rank has one point per step."""
        return 1.0

    @property
    def shard_weight(self) -> float:
        """All ranks have the same weight."""
        return 1.0

    @property
    def local_samples_if_unequal(self) -> None:
        """There are no shards of unequal size."""

    def count_samples(self, steps: int) -> int:
        """Return the number of points in the first `steps` steps, which is `steps`."""
        return steps

    def state_dict(self) -> dict[str, int]:
        """Return the current round (`epoch`) and the position in it."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to the round and position in `state`."""
        self.epoch = state["epoch"]
        self.position = state["position"]

    def __iter__(self) -> Iterator[T]:
        """Yield the remaining points of the current round, then move to the start of the next round."""
        while self.position < len(self.points):
            self.position += 1
            yield self.points[self.position - 1]
        self.epoch += 1
        self.position = 0
