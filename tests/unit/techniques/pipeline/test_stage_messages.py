"""Messages between stages, through shared memory or the network."""

from __future__ import annotations

import pytest

from tests.harness.ranks.programs import check_program, execute_program


@pytest.mark.parametrize("mode", ["memory", "network", "groups", "small", "builtin", "sockets"])
def test_messages_arrive_through_every_transport(mode: str) -> None:
    check_program("message_memory", mode)


def test_a_silent_rank_is_named_after_the_timeout() -> None:
    process = execute_program("message_memory", "silent")
    assert process.returncode == 1
    message = "rank 0 received no message from rank 1 for the backward of microbatch 0 on stage 0 within 2 s"
    assert message in process.stderr


def test_a_rank_that_exits_is_named_before_the_timeout() -> None:
    process = execute_program("message_memory", "exits")
    assert process.returncode == 1
    assert "rank 1 has closed its connection; see its log" in process.stderr
