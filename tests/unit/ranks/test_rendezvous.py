"""Ranks of a SLURM job connect by the id of the job, so that no port has to be chosen."""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from common.ranks import rendezvous
from common.ranks.rank_info import RankInfo
from common.system import network
from common.system.errors import UnreachableError, UserError
from configs.shared import Launch
from tests.harness.ranks.folder_rendezvous import fork
from tests.harness.ranks.programs import execute_launch_case

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
    monkeypatch.setattr(rendezvous, "PROBE_SECONDS", 0.5)
    attempt_id, _ = first_port
    rank_infos = [make_rank_info(rank, attempt_id) for rank in (1, 0)]
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda info: rendezvous.open_slurm_store(info, TIMEOUT), rank_infos))
    stores[0].set("greeting", "of rank 1")
    assert stores[1].get("greeting") == b"of rank 1"


def test_a_rank_of_another_attempt_is_refused() -> None:
    attempt_id = draw_attempt_id()
    store = rendezvous.open_slurm_store(make_rank_info(0, attempt_id), TIMEOUT)
    store.set("token", "of another attempt")
    with pytest.raises(UnreachableError, match="is used by another program"):
        rendezvous.open_slurm_store(make_rank_info(1, attempt_id), timedelta(seconds=1))


def test_the_file_of_a_store_remains_when_its_rank_exits(tmp_path: Path) -> None:
    """The destructor of the only member would delete the file."""

    def write_to_store() -> None:
        store, *_ = rendezvous.set_up_rendezvous(make_rank_info(0, "1", size=1), Launch(), TIMEOUT, tmp_path)
        store.set("key", "value")
        del store
        vars(rendezvous).clear()  # as the interpreter does with each module when it exits

    process = fork(write_to_store)
    process.join()
    assert process.exitcode == 0
    assert b"value" in (tmp_path / "store").read_bytes()


def test_a_name_of_the_first_host_that_other_hosts_cannot_use_is_refused() -> None:
    with pytest.raises(UserError, match=r"resolves to 127.0.0.1, which other hosts cannot reach"):
        rendezvous.check_rank0_name(make_rank_info(0, "1", nodes=2))
    with pytest.raises(UserError, match="cannot resolve its own name"):
        rendezvous.check_rank0_name(make_rank_info(0, "1", master="no-such-host.invalid"))


def test_an_ipv6_address_of_rank_0_is_refused() -> None:
    """The network interface of gloo and NCCL is found with an IPv4 address."""
    rank_info = RankInfo(1, size=2, nodes=2, launcher="torchrun", master="fd00::1:29400")
    message = "no IPv4 route to rank 0 on fd00::1: .*; use an IPv4 address or a name that resolves to one, or set"
    with pytest.raises(UserError, match=message):
        rendezvous.find_interface_to_rank0(rank_info)
    assert rendezvous.find_interface_to_rank0(dataclasses.replace(rank_info, master="127.0.0.1:29400")) == "lo"


@pytest.mark.parametrize(
    ("sizes", "backends", "message"),
    [
        ([2, 2, 2], ["nccl", "nccl", "gloo"], "uses the backend nccl, but .* uses gloo; .* set launch.mixed=true or"),
        ([2, 2, 1], ["gloo", "gloo", "gloo"], "has 2 ranks, but .* has 1; use the same --nproc-per-node on all hosts"),
    ],
)
def test_hosts_with_different_backends_or_numbers_of_ranks_are_refused(
    sizes: list[int], backends: list[str], message: str
) -> None:
    """Otherwise, the ranks would wait for each other until the time limit of the process group."""
    store = HashStore()

    def exchange(rank: int) -> tuple[str, ...]:
        rank_info = RankInfo(rank, size=3, local_size=sizes[rank], launcher="torchrun")
        return rendezvous.exchange_host_names(store, rank_info, backends[rank], TIMEOUT)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(exchange, rank) for rank in range(3)]:
            with pytest.raises(UserError, match=message):
                future.result()


@pytest.mark.parametrize("backend", ["auto", "builtin"])
def test_groups_of_a_mesh_have_the_step_timeout(backend: str, tmp_path: Path) -> None:
    process = execute_launch_case("create_a_mesh", tmp_path, backend)
    assert process.returncode == 0, process.stderr
