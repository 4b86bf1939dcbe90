"""Slices of the test set that are evaluated."""

from __future__ import annotations

import pytest

from common.training.evaluate import slice_batches, slice_shard


def test_the_last_partial_batch_is_evaluated() -> None:
    assert list(slice_batches(10, 4)) == [slice(0, 4), slice(4, 8), slice(8, 10)]


@pytest.mark.parametrize("count, size, ranks", [(101, 16, 2), (101, 16, 4), (9, 4, 2), (1, 10, 3), (64, 64, 1)])
def test_the_slices_of_all_ranks_cover_each_sample_once(count: int, size: int, ranks: int) -> None:
    """Every rank gets the same number of slices, and their lengths differ by at most one."""
    slices_by_rank = [list(slice_shard(count, size, rank, ranks)) for rank in range(ranks)]
    assert len({len(slices) for slices in slices_by_rank}) == 1
    samples: list[int] = []
    lengths = []
    for slices in slices_by_rank:
        for part in slices:
            samples += range(part.start, part.stop)
            lengths.append(part.stop - part.start)
    assert sorted(samples) == list(range(count))
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
