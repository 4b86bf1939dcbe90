"""Functions that build the built-in all-reduce algorithms. This module does not import torch.

A builder returns the same data as a custom function: an ordered list of moves for each rank. A move is (kind, chunk,
peer), or (kind, chunk, peer, chunks) if one message contains several consecutive chunks. The kinds are defined in
moves.py. In the docstrings below, p is the number of ranks and n is the size of the vector in bytes. The values of each
chunk are added up in one fixed order, and the sum is then copied to the other ranks. Therefore, the results are bitwise
identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

MoveTuple = tuple[str, int, int] | tuple[str, int, int, int]
MovePlan = list[list[MoveTuple]]
Hosts = Sequence[Hashable]  # the host of each rank


def list_ring_moves(ring: Sequence[int], position: int, first_chunk: int = 0) -> list[MoveTuple]:
    """Return the moves of one rank in a ring of ranks.

    The ring has one chunk per rank, and `first_chunk` is the number of its first chunk. In the first round, each chunk
    travels around the ring and each rank adds its own values. In the second round, the sums travel around the ring.
    """
    count = len(ring)
    left = ring[position - 1]
    right = ring[(position + 1) % count]
    moves: list[MoveTuple] = []
    for kind, shift in (("add", 0), ("receive", 1)):
        for step in range(count - 1):
            sent_chunk = position + shift - step
            moves.append(("send", first_chunk + sent_chunk % count, right))
            moves.append((kind, first_chunk + (sent_chunk - 1) % count, left))
    return moves


def build_ring(size: int) -> MovePlan:
    """Return the ring algorithm, in which each rank sends as few bytes as possible.

    Each rank sends 2 n (p - 1) / p bytes in 2 (p - 1) steps. The algorithm was published by Patarasuk & Yuan 2009,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations" (doi:10.1016/j.jpdc.2008.09.002). The ring
    became known in deep learning through Baidu's baidu-allreduce library (2017).
    """
    return [list_ring_moves(range(size), rank) for rank in range(size)]


def build_halving_doubling(size: int) -> MovePlan:
    """Return the recursive halving and doubling algorithm, which requires a power-of-two number of ranks.

    Each rank sends as many bytes as in the ring algorithm, but in only 2 log2(p) steps. Each rank exchanges half of the
    vector with the rank at distance p/2, then a quarter with the rank at distance p/4, and so on, and adds the received
    values. The sums are then exchanged in the reverse order. The source is Thakur, Rabenseifner, Gropp 2005,
    "Optimization of Collective Communication Operations in MPICH" (doi:10.1177/1094342005051521).
    """
    distances = list_powers_of_two(size)
    plan: MovePlan = [[] for _ in range(size)]
    for rank, moves in enumerate(plan):
        for distance in reversed(distances):
            first_chunk = rank - rank % distance
            peer = rank ^ distance
            moves.append(("send", first_chunk ^ distance, peer, distance))
            moves.append(("add", first_chunk, peer, distance))
        for distance in distances:
            first_chunk = rank - rank % distance
            peer = rank ^ distance
            moves.append(("send", first_chunk, peer, distance))
            moves.append(("receive", first_chunk ^ distance, peer, distance))
    return plan


def list_powers_of_two(size: int) -> list[int]:
    """Return the powers of two below `size`, in ascending order."""
    return [1 << exponent for exponent in range((size - 1).bit_length())]


def build_tree(size: int) -> MovePlan:
    """Return the binomial tree algorithm, which needs few steps and is therefore suited to small vectors.

    The tree adds up the vectors on rank 0, which then broadcasts the sum. Each message contains the whole vector, and
    the number of steps is 2 log2(p), with log2(p) rounded up. The source is Thakur, Rabenseifner, Gropp 2005
    (doi:10.1177/1094342005051521).
    """
    edges = []
    for distance in list_powers_of_two(size):
        for parent in range(0, size - distance, 2 * distance):
            edges.append((parent, parent + distance))
    plan: MovePlan = [[] for _ in range(size)]
    for parent, child in edges:
        plan[child].append(("send", 0, parent))
        plan[parent].append(("add", 0, child))
    for parent, child in reversed(edges):
        plan[parent].append(("send", 0, child))
        plan[child].append(("receive", 0, parent))
    return plan


def build_star(size: int) -> MovePlan:
    """Return the star algorithm, in which rank 0 adds up all vectors and sends the sum to all other ranks.

    In total, 2 n (p - 1) bytes pass through the network cable of rank 0.
    """
    leaves = range(1, size)
    centre_moves: list[MoveTuple] = [("add", 0, rank) for rank in leaves]
    centre_moves += [("send", 0, rank) for rank in leaves]
    leaf_moves: list[MoveTuple] = [("send", 0, 0), ("receive", 0, 0)]
    return [centre_moves, *(list(leaf_moves) for _ in leaves)]


def build_sharded_star(size: int) -> MovePlan:
    """Return an algorithm of p stars, one per chunk, each with a different rank at its center.

    Each rank sends as many bytes as in the ring algorithm, but the latency is lower.
    """
    return build_two_level(["the same host"] * size)


def build_two_level(hosts: Hosts) -> MovePlan:
    """Return an all-reduce that sends as few bytes as possible between hosts.

    `hosts[r]` is the host of rank r. The vector is divided into as many slices as the smallest host has ranks. On each
    host, the i-th rank adds up slice i over all ranks of the host. For each slice, the i-th ranks of all hosts then
    form a ring. Finally, the i-th rank of each host sends the sum to all other ranks of the host. With h
    hosts and a vector of n bytes, each host sends 2 n (h - 1) / h bytes to other hosts. With one rank per host, the
    algorithm is identical to the ring.
    """
    teams_by_host: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        teams_by_host.setdefault(host, []).append(rank)
    teams = list(teams_by_host.values())

    slices = min(map(len, teams))
    width = len(teams)  # a slice has one chunk per host
    plan: MovePlan = [[] for _ in hosts]
    for team_number, team in enumerate(teams):
        for position, rank in enumerate(team):
            moves = plan[rank]
            # at any time, all ranks of the host send to different peers
            peers = [(position + distance) % len(team) for distance in range(1, len(team))]
            moves += [("send", width * i, team[i], width) for i in peers if i < slices]
            if position < slices:
                first_chunk = width * position
                moves += [("add", first_chunk, team[i], width) for i in reversed(peers)]
                ring = [members[position] for members in teams]
                moves += list_ring_moves(ring, team_number, first_chunk)
                moves += [("send", first_chunk, team[i], width) for i in peers]
            moves += [("receive", width * i, team[i], width) for i in reversed(peers) if i < slices]
    return plan


BUILDERS: dict[str, Callable[[int], MovePlan]] = {
    "ring": build_ring,
    "halving_doubling": build_halving_doubling,
    "tree": build_tree,
    "star": build_star,
    "sharded_star": build_sharded_star,
}
ALGORITHM_NAMES = (*BUILDERS, "two_level")
