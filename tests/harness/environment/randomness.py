"""Random choices of tests. A seed that the tests print repeats them."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import time
from collections.abc import Sequence
from typing import TypeVar

from tests.harness.repository import ROOT

Item = TypeVar("Item")
DRAWN_SHARE = 1 / 6  # of the tests with the marker `drawn`
SEED_VARIABLE = "TEST_SEED"
ALL_CASES_VARIABLE = "ALL_CASES"
"""Environment variable of `make verify`. If it is set, all cases of lists are executed."""


def draw_seed(name: str) -> str:
    """Return a new seed, or that of TEST_SEED. pytest shows the printed line if the test fails."""
    seed = os.environ.get(SEED_VARIABLE) or str(time.time_ns() % 10**9)
    print(f"{SEED_VARIABLE}={seed} repeats the random choices of {name}")
    return f"{seed}/{name}"


def create_random(name: str) -> random.Random:
    """Return a random number generator with the seed of `draw_seed`."""
    return random.Random(draw_seed(name))


def read_commit_seed() -> str:
    """Return the seed for drawn cases: TEST_SEED, or the commit that is checked out.

    All workers of a test run must draw the same cases.
    """
    return os.environ.get(SEED_VARIABLE) or read_commit() or "0"


@functools.cache
def read_commit() -> str:
    """Return the first digits of the commit that is checked out, or an empty string outside a Git repository."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout.strip()


def is_test_drawn(test: str) -> bool:
    """Return whether a test with the marker `drawn` is executed. `make verify` executes all of them.

    The result depends only on the seed and on the name of the test.
    """
    if os.environ.get(ALL_CASES_VARIABLE):
        return True
    return random.Random(f"{read_commit_seed()}/{test}").random() < DRAWN_SHARE


def draw_cases(name: str, cases: Sequence[Item], count: int) -> list[Item]:
    """Draw `count` cases of a list in the order of the list. `make verify` executes all cases."""
    if os.environ.get(ALL_CASES_VARIABLE):
        return list(cases)
    stream = random.Random(f"{read_commit_seed()}/{name}")
    drawn_count = min(count, len(cases))
    positions = stream.sample(range(len(cases)), drawn_count)
    return [cases[position] for position in sorted(positions)]
