"""Ranks that join a world: the store in a private folder, the comparison of hosts, and the time limit of groups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from common.ranks import rendezvous
from common.ranks.rank_info import RankInfo
from common.system.errors import UserError
from configs.shared import Launch
from tests.harness.ranks.folder_rendezvous import fork
from tests.harness.ranks.programs import execute_launch_case

TIMEOUT = timedelta(seconds=20)


def test_the_file_of_a_store_remains_when_its_rank_exits(tmp_path: Path) -> None:
    """The destructor of the only member would delete the file."""

    def write_to_store() -> None:
        rank_info = RankInfo(launcher="slurm", master="localhost", attempt_id="1")
        store, *_ = rendezvous.set_up_rendezvous(rank_info, Launch(), TIMEOUT, tmp_path)
        store.set("key", "value")
        del store
        vars(rendezvous).clear()  # as the interpreter does with each module when it exits

    process = fork(write_to_store)
    process.join()
    assert process.exitcode == 0
    assert b"value" in (tmp_path / "store").read_bytes()


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


def test_a_group_may_be_left_before_its_last_callback_is_freed(tmp_path: Path) -> None:
    process = execute_launch_case("a_callback_is_freed_after_the_group", tmp_path)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("backend", ["auto", "builtin"])
def test_groups_of_a_mesh_have_the_step_timeout(backend: str, tmp_path: Path) -> None:
    process = execute_launch_case("create_a_mesh", tmp_path, backend)
    assert process.returncode == 0, process.stderr
