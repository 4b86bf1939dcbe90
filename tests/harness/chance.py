"""Random choices of tests, which a printed seed repeats."""

from __future__ import annotations

import os
import random
import time


def draw_seed(name: str) -> str:
    """A new seed, or that of TEST_SEED; pytest shows the printed line with a failure."""
    seed = os.environ.get("TEST_SEED") or str(time.time_ns() % 10**9)
    print(f"TEST_SEED={seed} repeats the random choices of {name}")
    return f"{seed}/{name}"


def open_stream(name: str) -> random.Random:
    return random.Random(draw_seed(name))
