"""Ranks of a SLURM job meet by the job's identifier, without a port that anybody has chosen."""

from __future__ import annotations

import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from common.ranks import rendezvous
from common.ranks.rank_info import RankInfo
from common.system import network
from common.system.errors import UnreachableError, UserError
from configs.shared import Launch


def make_rank_info(rank: int, attempt_id: str, **changed: object) -> RankInfo:
    known = {"rank": rank, "size": 2, "local_size": 2, "launcher": "slurm", "master": "localhost"}
    return RankInfo(**known | {"attempt_id": attempt_id} | changed)  # type: ignore[arg-type]


def test_ranks_of_a_job_meet_although_a_mute_program_has_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PROBE_SECONDS", 0.5)
    attempt = f"{socket.gethostname()}.{secrets.token_hex(8)}"
    ranks = [make_rank_info(rank, attempt) for rank in (1, 0)]
    with socket.create_server(("127.0.0.1", network.derive_ports(attempt)[0])), ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda info: rendezvous.open_slurm_store(info, timedelta(seconds=20)), ranks))
    stores[0].set("greeting", "of rank 1")
    assert stores[1].get("greeting") == b"of rank 1"


def test_a_rank_of_another_attempt_does_not_get_in() -> None:
    attempt = f"{socket.gethostname()}.{secrets.token_hex(8)}"
    store = rendezvous.open_slurm_store(make_rank_info(0, attempt), timedelta(seconds=20))
    store.set("token", "of another attempt")
    with pytest.raises(UnreachableError, match="is used by another program"):
        rendezvous.open_slurm_store(make_rank_info(1, attempt), timedelta(seconds=1))


def test_the_file_of_a_store_is_left_alone_when_its_rank_exits(tmp_path: Path) -> None:
    """The destructor of the only member would delete the file."""
    rank_info = make_rank_info(0, "1", size=1, local_size=1)
    pid = os.fork()
    if not pid:
        try:
            rendezvous.set_up_rendezvous(rank_info, Launch(), timedelta(seconds=20), tmp_path)[0].set("key", "value")
            vars(rendezvous).clear()  # what the interpreter does with each module when it exits
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert b"value" in (tmp_path / "store").read_bytes()


def test_a_first_host_that_others_cannot_find_is_told() -> None:
    with pytest.raises(UserError, match=r"resolves to 127.0.0.1, which other hosts cannot reach"):
        rendezvous.check_rank0_name(make_rank_info(0, "1", nodes=2))
    with pytest.raises(UserError, match="cannot resolve its own name"):
        rendezvous.check_rank0_name(make_rank_info(0, "1", master="no-such-host.invalid"))
