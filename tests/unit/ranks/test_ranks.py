"""When the ranks of a run change, their world is replaced, and all objects that share them use the new one."""

from __future__ import annotations

import torch
from torch.distributed import HashStore

from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World


def test_renumbered_ranks_are_ordered_by_host_and_keep_their_original_number() -> None:
    before = World(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        nodes=2,
        hosts=("a", "a", "b", "b"),
        device=torch.device("cpu"),
        backend="gloo",
        threads=1,
        store=HashStore(),
    )
    ranks = Ranks(before)
    ranks.renumber(2, ["a", "b", "b"])
    world = ranks.current
    assert (world.rank, world.size) == (2, 3)
    assert world.hosts == ("a", "b", "b")
    assert (world.local_rank, world.local_size) == (1, 2)
    assert world.original_rank == 3
    assert world.store is None
    assert (before.rank, before.size) == (3, 4), "a World is never changed"

    ranks.renumber(0, ["b"])
    assert ranks.current.is_main
    assert ranks.current.original_rank == 3


def test_a_rank_that_joins_may_become_rank_0() -> None:
    joining = World(
        is_joining=True, started_as_rank=0, hosts=("a",), device=torch.device("cpu"), backend="gloo", threads=1
    )
    ranks = Ranks(joining)
    assert not ranks.current.is_main
    ranks.renumber(0, ["a", "a"])
    assert ranks.current.is_main
    assert ranks.current.original_rank == 0
