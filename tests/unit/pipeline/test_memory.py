"""Messages through shared memory: a host without any is no obstacle, silence is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from common.ranks.links import memory_stream
from tests.harness import warm
from tests.harness.processes import environment


def exchange(what: str) -> subprocess.CompletedProcess[str]:
    """Three steps of messages between two processes."""
    return warm.execute([sys.executable, "-m", "tests.harness.exchange", what], env=environment())


@pytest.mark.parametrize("what", ["memory", "network", "groups", "small"])
def test_every_way_delivers(what: str) -> None:
    done = exchange(what)
    assert done.returncode == 0, done.stderr


def test_ranks_sleep_at_once_where_they_are_more_than_the_allowed_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    assert [memory_stream.choose_polling_seconds(ranks) for ranks in (2, 3)] == [memory_stream.POLLING_SECONDS, 0.0]
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")  # each rank is bound to its own
    assert [memory_stream.choose_polling_seconds(ranks) for ranks in (4, 5)] == [memory_stream.POLLING_SECONDS, 0.0]


def test_silence_ends_with_the_time_out_and_names_the_rank() -> None:
    done = exchange("silent")
    assert done.returncode == 1
    expected = "rank 0 received no message from rank 1 for the backward of microbatch 0 on stage 0 within 2 s"
    assert expected in done.stderr


def test_a_rank_that_has_ended_is_noticed_before_the_time_out() -> None:
    done = exchange("gone")
    assert done.returncode == 1
    assert "rank 1 has closed its connection; see its log" in done.stderr
