"""Parameters are divided among ranks so that the largest part is small."""

from __future__ import annotations

from common.techniques.sharded_optimizer.api import assign_to_ranks


def test_the_largest_parameters_are_assigned_first() -> None:
    owners = assign_to_ranks([1, 2, 6, 4], 2)
    assert owners == [0, 1, 0, 1]
    owners = assign_to_ranks([3, 3, 3], 3)
    assert owners == [0, 1, 2]


def test_a_rank_may_have_no_parameters() -> None:
    owners = assign_to_ranks([5, 7], 4)
    assert owners == [1, 0]
    owners = assign_to_ranks([], 2)
    assert owners == []


def test_one_rank_has_all_parameters() -> None:
    owners = assign_to_ranks([8, 2], 1)
    assert owners == [0, 0]


def test_frozen_parameters_do_not_count() -> None:
    """Their size is 0."""
    owners = assign_to_ranks([0, 4, 0], 2)
    assert owners == [1, 0, 1]
