"""Messages through shared memory: nothing stays behind, a small /dev/shm is no obstacle, silence is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness import warm
from tests.harness.processes import environment


def exchange(what: str) -> subprocess.CompletedProcess[str]:
    """Three steps of messages between two processes."""
    return warm.execute([sys.executable, "-m", "tests.harness.exchange", what], env=environment())


@pytest.mark.parametrize("what", ["memory", "network", "small"])
def test_every_way_delivers_and_leaves_nothing(what: str) -> None:
    done = exchange(what)
    assert done.returncode == 0, done.stderr


def test_silence_ends_with_the_time_out_and_names_the_rank() -> None:
    done = exchange("silent")
    assert done.returncode == 1
    assert "rank 0 waited 2 s for rank 1: nothing came for the backward of microbatch 0 on stage 0" in done.stderr
