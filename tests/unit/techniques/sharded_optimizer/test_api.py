"""Parameters are divided among ranks so that the largest part is small."""

from __future__ import annotations

import pytest

from common.techniques.sharded_optimizer.api import assign_to_ranks


@pytest.mark.parametrize(
    "sizes, ranks, owners",
    [
        ([3, 3, 3, 3], 2, [0, 1, 0, 1]),
        ([1, 2, 6, 4], 2, [0, 1, 0, 1]),
        ([10, 1, 1], 3, [0, 1, 2]),
        ([5, 7], 4, [1, 0]),  # two ranks update nothing
        ([0, 0, 4], 2, [1, 1, 0]),  # frozen parameters have size 0
        ([8, 2], 1, [0, 0]),
        ([], 2, []),
    ],
)
def test_the_largest_parameters_are_assigned_first(sizes: list[int], ranks: int, owners: list[int]) -> None:
    assert assign_to_ranks(sizes, ranks) == owners
