"""Shards that follow the speed of the ranks: the model of step times, the choice, and changes during a run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from common.techniques.data_parallel import shards
from common.techniques.data_parallel.shards import (
    WINDOW,
    AutoShards,
    StepTimeModel,
    choose_shard_sizes,
    predict_slowest_rank_seconds,
)
from tests.harness.environment.randomness import create_random

FAST = StepTimeModel(0.004, 0.001)
HALF_AS_FAST = StepTimeModel(0.008, 0.002)
EQUAL = (48, 48)


class SimulatedRun:
    """A run of two ranks with batches of 96 samples, seen from rank 0. Its loader is this object.

    `measured` are the speeds that the ranks measure before the first step, `speeds` the true ones.
    """

    def __init__(self, *measured: StepTimeModel) -> None:
        self.speeds = [FAST, FAST]
        self.counts = EQUAL
        self.messages: list[str] = []
        lines = [[speed.base, speed.per_sample] for speed in measured]
        world = SimpleNamespace(rank=0, all_gather=lambda _: lines)
        state = SimpleNamespace(loader=self)
        run = SimpleNamespace(world=world, log_message=self.messages.append, state=state)
        self.auto = AutoShards(cast(Any, run), lambda batch: measured[0])
        self.auto.before_load()
        world.all_gather = lambda _: self.compute_step_seconds()

    def compute_step_seconds(self) -> list[float]:
        """Return the true step time of each rank."""
        ranks = zip(self.speeds, self.counts, strict=True)
        return [speed.predict_step_seconds(count) for speed, count in ranks]

    def set_shards(self, rank: int, counts: tuple[int, int]) -> None:
        assert rank == 0
        assert sum(counts) == 96
        self.counts = counts

    def train(self, first_step: int, steps: int) -> None:
        for step in range(first_step, first_step + steps):
            if step % WINDOW == 0:
                self.auto.update_shards(step, self.compute_step_seconds()[0])


def test_the_chosen_shards_are_the_best_of_all() -> None:
    all_divisions = [counts for counts in itertools.product(range(1, 8), repeat=3) if sum(counts) == 9]
    chance = create_random("speeds of three ranks")
    for _ in range(20):
        speeds = [StepTimeModel(chance.random(), chance.random() + 0.01) for _ in range(3)]
        counts = choose_shard_sizes(speeds, 9)
        assert sum(counts) == 9
        minimum = min(predict_slowest_rank_seconds(speeds, division) for division in all_divisions)
        assert predict_slowest_rank_seconds(speeds, counts) == pytest.approx(minimum), speeds


def test_each_rank_keeps_a_sample_so_that_its_speed_is_measured() -> None:
    assert choose_shard_sizes([FAST, StepTimeModel(9.0, 9.0)], 10) == (9, 1)


@pytest.mark.parametrize(
    "seconds, base, per_sample",
    [((0.006, 0.012), 0.004, 0.001), ((0.008, 0.008), 0.0, 0.001), ((0.001, 0.008), 0.0, 0.001)],
)
def test_a_model_of_two_measured_sizes_has_no_negative_part(
    seconds: tuple[float, float], base: float, per_sample: float
) -> None:
    model = StepTimeModel.fit(2, 8, seconds)
    assert model.base == pytest.approx(base)
    assert model.per_sample == pytest.approx(per_sample)


def test_equally_fast_ranks_keep_equal_shards() -> None:
    run = SimulatedRun(FAST, StepTimeModel(0.0041, 0.00103))  # a difference of 3 % is noise
    run.train(1, 100)
    assert run.counts == EQUAL
    assert run.auto.history == [(1, EQUAL)]
    lines = "4 + 1 n ms on rank 0, 4.1 + 1.03 n ms on rank 1"
    assert run.messages == [f"shards=auto: using equal shards, because a step with n samples takes {lines}"]


def test_a_rank_that_is_half_as_fast_gets_about_half_as_many_samples() -> None:
    run = SimulatedRun(FAST, HALF_AS_FAST)
    run.speeds = [FAST, HALF_AS_FAST]
    assert run.counts == (66, 30)
    assert run.auto.history[-1] == (1, (66, 30))
    run.train(1, 100)
    (message,) = run.messages
    prefix = "shards=auto: using shards [66,30] from step 1, because a step with n samples takes 4 + 1 n ms on"
    assert message.startswith(prefix)
    assert message.endswith("this reduces the step time of the slowest rank to 67% of its previous value")


def test_local_samples_are_averaged_over_the_steps_of_the_attempt() -> None:
    run = SimulatedRun(FAST, FAST)
    run.auto.history = [(1, EQUAL), (11, (66, 30))]
    assert run.auto.average_local_samples(1, 20) == 57
    assert run.auto.average_local_samples(11, 20) == 66


def test_shards_follow_a_slow_rank_within_thirty_steps_and_return_afterward() -> None:
    run = SimulatedRun(FAST, FAST)
    run.train(1, 46)
    run.speeds = [FAST, HALF_AS_FAST]
    run.train(47, 30)
    assert run.counts == (66, 30)
    run.speeds = [FAST, FAST]
    run.train(77, 30)
    assert abs(run.counts[0] - 48) <= 1
    assert run.auto.history[0] == (1, EQUAL)


def test_a_measurement_on_a_busy_core_is_corrected() -> None:
    """Rank 1 measured a third of its speed, because another program used its core."""
    run = SimulatedRun(FAST, StepTimeModel(0.012, 0.003))
    assert run.counts[1] < 24
    run.train(1, 2 * WINDOW)
    assert abs(run.counts[1] - 48) <= 1


def test_the_speed_of_a_network_with_frozen_parameters_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SPEED_SECONDS", 0.001)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    world = SimpleNamespace(size=1, wait_for_all_ranks=lambda name: None)
    inputs = torch.rand(8, 4)
    run = cast(Any, SimpleNamespace(world=world, device=torch.device("cpu"), load_first_inputs=lambda count: inputs))
    shards.measure_rank_speed(run, model, model, 8)
    assert model[1].weight.grad is None
