"""The backend `builtin` with more numbers of ranks than the fast tests have, and what torch builds on it."""

from __future__ import annotations

import sys

import pytest

from tests.harness import warm
from tests.harness.processes import environment


@pytest.mark.parametrize(
    ("ranks", "transport", "cases"),
    [
        *((1, "auto", ()), (2, "auto", ()), (4, "auto", ()), (5, "network", ())),
        (8, "network", ("copies", "bits_are_equal")),
        *((ranks, "auto", ("bits_are_equal",)) for ranks in (6, 7)),
    ],
)
def test_every_collective_gives_what_arithmetic_gives(ranks: int, transport: str, cases: tuple[str, ...]) -> None:
    argv = [sys.executable, "-m", "tests.harness.backend_calls", str(ranks), transport, *cases]
    completed = warm.execute(argv, env=environment(), timeout=250)
    assert completed.returncode == 0, completed.stderr
