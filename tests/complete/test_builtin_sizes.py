"""The backend `builtin` with other numbers of ranks than the fast tests have."""

from __future__ import annotations

import sys

import pytest

from tests.harness import warm
from tests.harness.processes import environment


@pytest.mark.parametrize(
    ("ranks", "transport"), [(1, "auto"), (4, "auto"), (5, "network"), (6, "auto"), (8, "network")]
)
def test_every_collective_gives_what_arithmetic_gives(ranks: int, transport: str) -> None:
    argv = [sys.executable, "-m", "tests.harness.collectives", str(ranks), transport]
    done = warm.execute(argv, env=environment(), timeout=250)
    assert done.returncode == 0, done.stderr
