"""Ranks of torchrun connect by its address, and ranks of a SLURM job by the id of the job, without a chosen port."""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from common.ranks import host_rendezvous
from common.ranks.rank_info import RankInfo
from common.system import network
from common.system.errors import UnreachableError, UserError

TIMEOUT = timedelta(seconds=20)


def make_rank_info(rank: int, attempt_id: str, *, size: int = 2, nodes: int = 1, master: str = "localhost") -> RankInfo:
    return RankInfo(
        rank=rank,
        size=size,
        local_size=size,
        nodes=nodes,
        launcher="slurm",
        master=master,
        attempt_id=attempt_id,
    )


def draw_attempt_id() -> str:
    return f"{socket.gethostname()}.{secrets.token_hex(8)}"


@pytest.fixture
def first_port() -> Iterator[tuple[str, socket.socket]]:
    """An attempt id, and a socket that listens on the first port of this id."""
    while True:
        attempt_id = draw_attempt_id()
        try:
            server = socket.create_server(("127.0.0.1", network.derive_ports(attempt_id)[0]))
        except OSError:  # another program uses this port and may close it at any time
            continue
        with server:
            yield attempt_id, server
        return


def test_ranks_of_a_job_meet_although_another_program_has_their_first_port(
    first_port: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_rendezvous, "PROBE_SECONDS", 0.5)
    attempt_id, _ = first_port
    rank_infos = [make_rank_info(rank, attempt_id) for rank in (1, 0)]
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda info: host_rendezvous.open_slurm_store(info, TIMEOUT), rank_infos))
    stores[0].set("greeting", "of rank 1")
    assert stores[1].get("greeting") == b"of rank 1"


def test_a_rank_of_another_attempt_is_refused() -> None:
    attempt_id = draw_attempt_id()
    store = host_rendezvous.open_slurm_store(make_rank_info(0, attempt_id), TIMEOUT)
    store.set("token", "of another attempt")
    with pytest.raises(UnreachableError, match="is used by another program"):
        host_rendezvous.open_slurm_store(make_rank_info(1, attempt_id), timedelta(seconds=1))


def test_a_name_of_the_first_host_that_other_hosts_cannot_use_is_refused() -> None:
    with pytest.raises(UserError, match=r"resolves to 127.0.0.1, which other hosts cannot reach"):
        host_rendezvous.check_rank0_name(make_rank_info(0, "1", nodes=2))
    with pytest.raises(UserError, match="cannot resolve its own name"):
        host_rendezvous.check_rank0_name(make_rank_info(0, "1", master="no-such-host.invalid"))


def test_an_ipv6_address_of_rank_0_is_refused() -> None:
    """The network interface of gloo and NCCL is found with an IPv4 address."""
    rank_info = RankInfo(1, size=2, nodes=2, launcher="torchrun", master="fd00::1:29400")
    message = "no IPv4 route to rank 0 on fd00::1: .*; use an IPv4 address or a name that resolves to one, or set"
    with pytest.raises(UserError, match=message):
        host_rendezvous.find_interface_to_rank0(rank_info)
    assert host_rendezvous.find_interface_to_rank0(dataclasses.replace(rank_info, master="127.0.0.1:29400")) == "lo"
