"""The rank and world size of a process, read from the environment of its launcher."""

from __future__ import annotations

import pytest

from common.ranks.rank_info import RankInfo, parse_first_host, read_rank_info
from common.system.errors import UserError

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "a", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "40017", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "rank_info"),
    [
        ({}, None),
        (BATCH_SCRIPT, None),
        (TORCHRUN, RankInfo(3, 4, 1, 2, 2, "torchrun", "a:29400")),
        (SRUN, RankInfo(2, 4, 0, 2, 2, "slurm", "gpu07", "40017.0.0")),
        (SRUN | TORCHRUN, RankInfo(3, 4, 1, 2, 2, "torchrun", "a:29400")),
    ],
    ids=["laptop", "batch script", "torchrun", "srun", "torchrun in an allocation"],
)
def test_the_rank_is_read_from_the_environment(environ: dict[str, str], rank_info: RankInfo | None) -> None:
    assert read_rank_info(environ) == rank_info


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    remedy = "use the same --nproc-per-node on all hosts"
    with pytest.raises(UserError, match=f"torchrun started 5 ranks, of which 2 run on this host; {remedy}"):
        read_rank_info(TORCHRUN | {"WORLD_SIZE": "5"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[03-07,9],x1", "n03"),
        ("a-[2,4]", "a-2"),
        ("x1,n[3-4]", "x1"),
        ("n[3-4]-ib,x1", "n3-ib"),
    ],
)
def test_the_first_host_of_a_nodelist_is_found(nodelist: str, host: str) -> None:
    assert parse_first_host(nodelist) == host
