"""Ten thousand inputs that no rank sends, to each kind of port: no rank crashes, and the right rank connects."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from common.ranks.links.connecting import RankAddress
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.environment.randomness import draw_seed
from tests.harness.ranks.folder_rendezvous import FolderRendezvous, identity, rendezvous
from tests.harness.ranks.foreign_clients import send_random_inputs

__all__ = ["identity", "rendezvous"]


def test_ten_thousand_inputs_crash_no_rank(rendezvous: FolderRendezvous) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending_rank_0 = pool.submit(rendezvous.join, 0, 2)
        address = RankAddress(*json.loads(rendezvous.get("link/0")))
        send_random_inputs(address, 10_000, draw_seed("strangers"), is_local=bool(address.unix_socket_name))
        rank_1 = rendezvous.join(1, 2)
        rank_1.outgoing[0].send(0, b"four")
        rank_0 = pending_rank_0.result(WAIT_TIMEOUT)
        received = bytearray(4)
        rank_0.incoming[1].receive(0, received)
        assert received == b"four"
        assert 1 <= len(rendezvous.warnings) <= 2
