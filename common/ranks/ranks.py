"""The ranks of a run, which may change while the run trains."""

from __future__ import annotations

import dataclasses
from typing import Any

from common.ranks.rendezvous import World


class Ranks:
    """Ranks of a run. Ranks of an elastic run can be lost or join between two steps.

    Objects that outlive a step hold a `Ranks` and read `current` whenever they need it, because `current` is replaced
    when the ranks change.
    """

    def __init__(self, world: World) -> None:
        self._current = world

    @property
    def current(self) -> World:
        """The ranks that train now, and the position of this rank among them."""
        return self._current

    def update(self, **facts: Any) -> World:
        """Replace the current `World` by one in which the fields `facts` have changed, and return it."""
        self._current = dataclasses.replace(self._current, **facts)
        return self._current
