"""The backend `builtin` with more numbers of ranks than in the fast tests, and torch's functions on top of it."""

from __future__ import annotations

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.ranks.programs import check_program

COPYING_WORLD = (8, "network", ("copies", "reproducible_bits"))
OTHER_WORLDS = [
    (1, "auto", ()),
    (2, "auto", ()),
    (4, "auto", ()),
    (5, "network", ()),
    (6, "auto", ("reproducible_bits",)),
    (7, "auto", ("reproducible_bits",)),
]


@pytest.mark.parametrize("ranks, transport, cases", [COPYING_WORLD, *draw_cases("collectives", OTHER_WORLDS, 1)])
def test_every_collective_equals_arithmetic(ranks: int, transport: str, cases: tuple[str, ...]) -> None:
    check_program("backend_calls", ranks, transport, *cases)
