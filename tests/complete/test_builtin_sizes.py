"""The backend `builtin` with more numbers of ranks than in the fast tests, and torch's functions on top of it."""

from __future__ import annotations

import sys

import pytest

from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment

WORLDS = [
    (1, "auto", ()),
    (2, "auto", ()),
    (4, "auto", ()),
    (5, "network", ()),
    (6, "auto", ("bits_are_equal",)),
    (7, "auto", ("bits_are_equal",)),
    (8, "network", ("copies", "bits_are_equal")),
]


@pytest.mark.parametrize(("ranks", "transport", "cases"), WORLDS)
def test_every_collective_equals_arithmetic(ranks: int, transport: str, cases: tuple[str, ...]) -> None:
    argv = [sys.executable, "-m", "tests.harness.ranks.backend_calls", str(ranks), transport, *cases]
    completed = execution.execute_command(argv, env=make_environment(), timeout=250)
    assert completed.returncode == 0, completed.stderr
