"""Words of messages."""

from __future__ import annotations

import pytest

from common.system.text import format_count, format_duration


def test_a_count_has_the_noun_of_its_number() -> None:
    assert [format_count(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert format_count(2, "process") == "2 processes"
    assert format_count(12_345, "step") == "12,345 steps"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (29 * 60, "29 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
