"""Words of messages."""

from __future__ import annotations

from common.core.text import format_count


def test_a_count_has_the_noun_of_its_number() -> None:
    assert [format_count(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert format_count(2, "process") == "2 processes"
    assert format_count(12_345, "step") == "12,345 steps"
