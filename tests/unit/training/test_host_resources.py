"""Resources of a host that its ranks share."""

from __future__ import annotations

import pytest

from common.training.host_resources import print_notice_of_shared_cores
from configs.ddp_multinode import Config
from configs.shared import Launch

NOTICE = "64 ranks share 2 cores of this host; steps will be slow\n"


@pytest.mark.parametrize("ranks, job_cores, notice", [(64, 0, NOTICE), (2, 0, ""), (64, 64, "")])
def test_more_ranks_than_cores_get_a_notice(
    ranks: int, job_cores: int, notice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(job_cores))
    print_notice_of_shared_cores(Config(launch=Launch(device="cpu")), ranks)
    assert capsys.readouterr().out == notice
