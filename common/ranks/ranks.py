"""The ranks of a run, which may change while the run trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from common.ranks.rendezvous import World


class Ranks:
    """Ranks of a run. In an elastic run, ranks can be lost or join between two steps.

    An object that exists for longer than a step stores a `Ranks` object and reads `current` at each use, because
    another `World` replaces `current` when the ranks change.
    """

    def __init__(self, world: World) -> None:
        self._current = world

    @property
    def current(self) -> World:
        """The ranks that train now, and the position of this rank among them."""
        return self._current

    def renumber(self, rank: int, hosts: Sequence[str]) -> None:
        """Replace `current` after ranks were lost or have joined.

        `rank` is the new number of this rank, and `hosts` contains the host name of each rank. The rendezvous store is
        dropped, because the process that serves it may be lost.
        """
        host = hosts[rank]
        self._current = dataclasses.replace(
            self._current,
            rank=rank,
            size=len(hosts),
            local_rank=hosts[:rank].count(host),
            local_size=hosts.count(host),
            is_joining=False,
            started_as_rank=self._current.original_rank,
            hosts=tuple(hosts),
            store=None,
        )
