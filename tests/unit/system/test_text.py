"""Counts and durations in messages."""

from __future__ import annotations

import pytest

from common.system.text import format_count, format_duration

COUNTS = [
    (0, "rank", "0 ranks"),
    (1, "rank", "1 rank"),
    (2, "rank", "2 ranks"),
    (2, "process", "2 processes"),
    (12_345, "step", "12,345 steps"),
]


@pytest.mark.parametrize("count, noun, text", COUNTS)
def test_a_count_has_the_singular_or_plural_noun(count: int, noun: str, text: str) -> None:
    assert format_count(count, noun) == text


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (119, "119 s"), (29 * 60, "29 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
