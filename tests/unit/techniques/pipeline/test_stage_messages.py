"""Messages between stages, through shared memory or the network."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment


def exchange_messages(mode: str) -> subprocess.CompletedProcess[str]:
    """Exchange the messages of three steps between two processes."""
    return execution.execute_command(
        [sys.executable, "-m", "tests.harness.ranks.message_memory", mode], env=make_environment()
    )


@pytest.mark.parametrize("mode", ["memory", "network", "groups", "small"])
def test_messages_arrive_through_every_transport(mode: str) -> None:
    process = exchange_messages(mode)
    assert process.returncode == 0, process.stderr


def test_a_silent_rank_is_named_after_the_timeout() -> None:
    process = exchange_messages("silent")
    assert process.returncode == 1
    message = "rank 0 received no message from rank 1 for the backward of microbatch 0 on stage 0 within 2 s"
    assert message in process.stderr


def test_a_rank_that_exits_is_named_before_the_timeout() -> None:
    process = exchange_messages("gone")
    assert process.returncode == 1
    assert "rank 1 has closed its connection; see its log" in process.stderr
