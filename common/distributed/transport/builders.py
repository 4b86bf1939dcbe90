"""The built-in all-reduce algorithms, written as a function of one's own would be.

A builder returns for each rank the ordered list of its moves. A move is (kind, chunk, peer), or (kind, chunk, peer,
chunks) where one message holds several chunks from that one on; common/distributed/transport/moves.py says what they
mean. Below, p is the number of ranks and n the bytes of the vector. Every chunk is added up in one order and copied
from there, so that all ranks end with the same bits.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

MoveTuple = tuple[str, int, int] | tuple[str, int, int, int]
Plan = list[list[MoveTuple]]


def list_ring_moves(ring: Sequence[int], position: int, first: int = 0) -> list[MoveTuple]:
    """Return the moves of one member of a ring of ranks, whose chunks begin at number `first`.

    In the first round each chunk travels once around and is added at every stop; in the second its sum does.
    """
    count = len(ring)
    left, right = ring[position - 1], ring[(position + 1) % count]
    moves: list[MoveTuple] = []
    for kind, shift in (("add", 0), ("receive", 1)):
        for step in range(count - 1):
            leaves = position + shift - step
            moves += [("send", first + leaves % count, right), (kind, first + (leaves - 1) % count, left)]
    return moves


def build_ring(size: int) -> Plan:
    """Return the ring: each rank sends 2 (p - 1) / p n, the least there is, in 2 (p - 1) steps.

    Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
    (doi:10.1016/j.jpdc.2008.09.002); known in deep learning through Baidu's allreduce of 2017.
    """
    return [list_ring_moves(range(size), rank) for rank in range(size)]


def build_halving_doubling(size: int) -> Plan:
    """Return recursive halving and doubling for a power of two ranks: the ring's bytes in only 2 log2(p) steps.

    Ranks exchange halves, then quarters, ... of the vector with the rank p/2, p/4, ... away and add them; then they
    go the same way back (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in
    MPICH", doi:10.1177/1094342005051521).
    """
    distances = [1 << k for k in range((size - 1).bit_length())]
    plan: Plan = [[] for _ in range(size)]
    for rank, moves in enumerate(plan):
        for distance in reversed(distances):
            kept, peer = rank - rank % distance, rank ^ distance
            moves += [("send", kept ^ distance, peer, distance), ("add", kept, peer, distance)]
        for distance in distances:
            kept, peer = rank - rank % distance, rank ^ distance
            moves += [("send", kept, peer, distance), ("receive", kept ^ distance, peer, distance)]
    return plan


def build_tree(size: int) -> Plan:
    """Return the binomial tree: 2 log2(p) steps (rounded up) of the whole vector, so the fastest for few bytes.

    Rank 0 gets the sum and spreads it (Thakur, Rabenseifner, Gropp 2005, doi:10.1177/1094342005051521).
    """
    distances = [1 << k for k in range((size - 1).bit_length())]
    edges = [(parent, parent + d) for d in distances for parent in range(0, size - d, 2 * d)]
    plan: Plan = [[] for _ in range(size)]
    for parent, child in edges:
        plan[child].append(("send", 0, parent))
        plan[parent].append(("add", 0, child))
    for parent, child in reversed(edges):
        plan[parent].append(("send", 0, child))
        plan[child].append(("receive", 0, parent))
    return plan


def build_star(size: int) -> Plan:
    """Return the star: rank 0 adds up all vectors and sends the sum, so 2 (p - 1) n pass through its cable."""
    others = range(1, size)
    centre: list[MoveTuple] = [("add", 0, rank) for rank in others]
    centre += [("send", 0, rank) for rank in others]
    leaf: list[MoveTuple] = [("send", 0, 0), ("receive", 0, 0)]
    return [centre, *(list(leaf) for _ in others)]


def build_sharded_star(size: int) -> Plan:
    """Return p stars, each of one chunk around another rank: the ring's bytes, without waiting along a ring."""
    return build_two_level(["the same host"] * size)


def build_two_level(hosts: Sequence[Hashable]) -> Plan:
    """Return an all-reduce in which as few bytes as possible pass between hosts; `hosts` has the host of each rank.

    The vector has as many slices as the smallest host has ranks. A host adds up slice i at its i-th rank, the i-th
    ranks of all hosts make a ring for that slice, and then each of them gives the sum to its host. Between hosts each
    host sends 2 (h - 1) / h n, h being the number of hosts; with p ranks on p hosts this is the ring.
    """
    teams = [[rank for rank, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    slices, width = min(map(len, teams)), len(teams)  # a slice has a chunk for each host
    plan: Plan = [[] for _ in hosts]
    for team in teams:
        for position, rank in enumerate(team):
            moves = plan[rank]
            after = [(position + k) % len(team) for k in range(1, len(team))]  # at any time each sends to another one
            moves += [("send", width * i, team[i], width) for i in after if i < slices]
            if position < slices:
                moves += [("add", width * position, team[i], width) for i in reversed(after)]
                moves += list_ring_moves([one[position] for one in teams], teams.index(team), width * position)
                moves += [("send", width * position, team[i], width) for i in after]
            moves += [("receive", width * i, team[i], width) for i in reversed(after) if i < slices]
    return plan


BUILDERS: dict[str, Callable[[int], Plan]] = {
    "ring": build_ring,
    "halving_doubling": build_halving_doubling,
    "tree": build_tree,
    "star": build_star,
    "sharded_star": build_sharded_star,
}
NAMES = (*BUILDERS, "two_level")
