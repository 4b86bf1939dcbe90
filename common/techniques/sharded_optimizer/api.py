"""The division of parameters among ranks, which other techniques may use."""

from __future__ import annotations

from collections.abc import Sequence


def assign_to_ranks(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that updates each parameter, for parameters of the given sizes.

    A parameter is not split, because some optimizers need the whole parameter. The largest parameters are assigned
    first, each to the rank with the smallest sum of sizes so far (longest processing time first, Graham 1969).
    """
    loads = [0] * ranks
    owners = [0] * len(sizes)
    largest_first = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    for number in largest_first:
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += sizes[number]
    return owners


def divide_sizes(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the sizes of the parameters that each rank updates."""
    updated: list[list[int]] = [[] for _ in range(ranks)]
    for size, owner in zip(sizes, assign_to_ranks(sizes, ranks), strict=True):
        updated[owner].append(size)
    return updated
