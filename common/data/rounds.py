"""Points that are measured in turn, round after round, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Rounds(Generic[T]):
    """The points of a measurement in the place of a training's batches: one a step, and an epoch is a round.

    `epoch` and `position` (points of this round already handed out) are the whole state.
    """

    points: Sequence[T]

    def __post_init__(self) -> None:
        self.epoch = self.position = 0

    @property
    def steps(self) -> int:
        """Number of points in a round."""
        return len(self.points)

    def count_samples(self, steps: int) -> int:
        """Return the number of points in the first `steps` steps: as many."""
        return steps

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self.epoch, self.position = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[T]:
        """Yield the rest of the current round; at its end the next round begins."""
        while self.position < len(self.points):
            self.position += 1
            yield self.points[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0
