"""Ten thousand inputs that no rank sends, to each kind of port: nobody crashes, and the right rank still gets in."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from common.ranks.links.connecting import RankAddress
from tests.harness.chance import draw_seed
from tests.harness.processes import PATIENCE
from tests.harness.strangers import attack
from tests.harness.transport import Meeting, identity, meeting

__all__ = ["identity", "meeting"]


def test_ten_thousand_inputs_end_nobody(meeting: Meeting) -> None:
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(meeting.join, 0, 2)
        found = RankAddress(*json.loads(meeting.get("link/0")))
        attack(found, 10_000, draw_seed("strangers"), is_local=bool(found.unix_socket_name))
        one = meeting.join(1, 2)
        one.outgoing[0].send(0, b"four")
        got = bytearray(4)
        links = zero.result(PATIENCE)
        links.incoming[1].receive(0, got)
        assert got == b"four"
        assert 1 <= len(meeting.lines) <= 2
        for end in (one, links):
            end.close()
