"""Which errors of a collective are time-outs."""

from __future__ import annotations

import pytest

from common.system.errors import is_timeout

SAID = {
    "[transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete": True,
    "Application timeout caused pair closure": True,
    "[transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3141": False,
    "all_reduce: rank 1 does not answer (no progress for 120 s); see its log, or raise launch.step_timeout": True,
    "all_reduce: rank 1 has closed its connection; see its log": False,
}


@pytest.mark.parametrize("text", SAID)
def test_a_time_out_is_known_by_both_of_its_messages(text: str) -> None:
    assert is_timeout(RuntimeError(text)) == SAID[text]
    assert is_timeout(TimeoutError())
