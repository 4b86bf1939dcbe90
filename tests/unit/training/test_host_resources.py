"""Resources of a host that its ranks share."""

from __future__ import annotations

import pytest

from common.runs import provenance
from common.system import host_memory
from common.training.host_resources import check_resources, print_notice_of_shared_cores
from configs.ddp_multinode import Config
from configs.shared import Experiment, Launch

NOTICE = "64 ranks share 2 cores of this host; steps will be slow\n"


@pytest.mark.parametrize("ranks, job_cores, notice", [(64, 0, NOTICE), (2, 0, ""), (64, 64, "")])
@pytest.mark.parametrize("launch, gpus", [(Launch(device="cpu"), 64), (Launch(), 1)])
def test_more_ranks_than_cores_get_a_notice(
    ranks: int,
    job_cores: int,
    notice: str,
    launch: Launch,
    gpus: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With fewer GPUs than ranks, the ranks use CPUs."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(provenance, "count_visible_gpus", lambda: gpus)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(job_cores))
    print_notice_of_shared_cores(Config(launch=launch), ranks)
    assert capsys.readouterr().out == notice


@pytest.mark.parametrize("gpus, is_checked", [(0, True), (1, True), (2, False)])
def test_the_memory_is_checked_for_ranks_on_cpus(gpus: int, is_checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Experiment] = []
    monkeypatch.setattr(provenance, "count_visible_gpus", lambda: gpus)
    monkeypatch.setattr(host_memory, "check_host_memory", checked.append)
    check_resources(Config())
    assert bool(checked) == is_checked
