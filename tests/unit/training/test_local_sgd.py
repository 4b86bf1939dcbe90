"""Exchanges of local SGD lose nothing, are the same on all ranks, and send as many bytes as their formulas say."""

from __future__ import annotations

import sys

import pytest

from tests.harness import warm
from tests.harness.processes import environment


@pytest.mark.parametrize("backend", ["gloo", "builtin"])
def test_what_a_message_leaves_out_arrives_later(backend: str) -> None:
    argv = [sys.executable, "-m", "tests.harness.local_exchanges", *([backend] if backend == "builtin" else [])]
    done = warm.execute(argv, env=environment())
    assert done.returncode == 0, done.stderr
