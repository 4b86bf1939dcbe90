"""Report of data parallelism: straggler, exposed communication and efficiency."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from common.measure.step_timing import RankTimes
from common.ranks.rendezvous import World
from common.techniques.data_parallel.scaling_report import ScalingReport, time_gradient_all_reduce

HOSTS = ("a", "b", "c")


def make_times(rank: int, before_backward: float, exposed: tuple[float, ...] = ()) -> RankTimes:
    return RankTimes(data=0.001, before_backward=before_backward, step=0.1, steps=50, rank=rank, exposed=exposed)


RANKS = [
    make_times(0, 0.010, (0.5, 0.2, 0.9)),
    make_times(1, 0.020, (0.1, 0.3, 0.2)),
    make_times(2, 0.011, (0.6, 0.2, 0.4)),
]


def test_the_report_names_the_straggler() -> None:
    report = ScalingReport(RANKS, HOSTS, 0.1)
    assert report.straggler == 1
    assert "rank 1 on b: 20.00 ms" in report.rows()["straggler"]


def test_the_report_shows_exposed_communication_and_efficiency() -> None:
    report = ScalingReport(RANKS, HOSTS, communication_seconds=0.4, single_rank_seconds=0.15, step_seconds=0.1)
    assert report.exposed_fraction == pytest.approx(0.2 / 0.4)  # the median of 0.1, 0.2, 0.2
    assert report.efficiency == pytest.approx(0.15 / 0.1 / 3)
    assert "50%" in report.rows()["efficiency"]


def test_a_rank_that_is_hardly_slower_is_no_straggler() -> None:
    assert ScalingReport([make_times(0, 0.010), make_times(1, 0.011)], ("a", "b"), 0.1).straggler is None


def test_a_rank_with_more_samples_is_no_straggler() -> None:
    ranks = [replace(RANKS[0], samples=32), replace(RANKS[1], samples=64), replace(RANKS[2], samples=32)]
    assert ScalingReport(ranks, HOSTS, 0.1).straggler is None


def test_the_straggler_is_named_by_its_rank_if_a_rank_is_missing() -> None:
    """Rank 0 has just joined, and has no times yet."""
    report = ScalingReport([make_times(1, 0.010), make_times(2, 0.020)], HOSTS, 0.1)
    assert report.straggler == 2
    assert "rank 2 on c: 20.00 ms" in report.rows()["straggler"]


def test_the_report_of_one_rank_contains_only_the_time_of_a_step() -> None:
    assert ScalingReport(RANKS[:1], "a", 0.1).rows().keys() == {"ms per step"}


def test_frozen_parameters_are_not_communicated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    all_reduce = dist.all_reduce

    def record_size(tensor: Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", record_size)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = nn.Sequential(nn.Linear(20, 10).requires_grad_(False), nn.Linear(10, 2))
    assert time_gradient_all_reduce(model, 25, 4)
    assert set(sizes) == {10 * 2 + 2}
