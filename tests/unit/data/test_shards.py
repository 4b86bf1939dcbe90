"""Shards that follow the speed of the ranks: the line, the choice, and what a disturbance does, by numbers."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.techniques.data_parallel.shards import (
    WINDOW,
    AutoShards,
    StepTimeModel,
    choose_shard_sizes,
    predict_slowest_rank_seconds,
)

QUICK, HALF = StepTimeModel(0.004, 0.001), StepTimeModel(0.008, 0.002)


class Simulated:
    """A loader of 96 samples on two ranks with the true speeds `real`, of which rank 0 is looked at."""

    def __init__(self, *measured: StepTimeModel) -> None:
        self.real, self.said = [QUICK, QUICK], list[str]()
        self.counts: tuple[int, ...] = (48, 48)
        lines = [[speed.base, speed.per_sample] for speed in measured]
        world = SimpleNamespace(rank=0, all_gather=lambda _: lines)
        run = SimpleNamespace(world=world, log_message=self.said.append, state=SimpleNamespace(loader=self))
        self.auto = AutoShards(cast(Any, run), lambda batch: measured[0])
        self.auto.before_load()
        world.all_gather = lambda _: [s.predict_step_seconds(n) for s, n in zip(self.real, self.counts, strict=True)]

    def set_shards(self, rank: int, counts: tuple[int, ...]) -> None:
        assert rank == 0 and sum(counts) == 96
        self.counts = counts

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            if step % WINDOW == 0:
                self.auto.update_shards(step, self.real[0].predict_step_seconds(self.counts[0]))


def test_the_chosen_shards_are_the_best_of_all() -> None:
    for _ in range(20):
        speeds = [StepTimeModel(random.random(), random.random() + 0.01) for _ in range(3)]
        chosen = choose_shard_sizes(speeds, 9)
        every = (cut for cut in itertools.product(range(1, 8), repeat=3) if sum(cut) == 9)
        best = min(predict_slowest_rank_seconds(speeds, cut) for cut in every)
        assert predict_slowest_rank_seconds(speeds, chosen) == pytest.approx(best) and sum(chosen) == 9, speeds
    assert choose_shard_sizes([QUICK, StepTimeModel(9.0, 9.0)], 10) == (9, 1), (
        "none is left without a sample: it is still measured"
    )


@pytest.mark.parametrize(
    ("seconds", "speed"),
    [((0.006, 0.012), (0.004, 0.001)), ((0.008, 0.008), (0.0, 0.001)), ((0.001, 0.008), (0.0, 0.001))],
)
def test_the_line_of_two_sizes_has_no_negative_part(seconds: tuple[float, float], speed: tuple[float, float]) -> None:
    found = StepTimeModel.fit(2, 8, seconds)
    assert (found.base, found.per_sample) == pytest.approx(speed)


def test_equally_fast_ranks_keep_equal_shards() -> None:
    run = Simulated(QUICK, StepTimeModel(0.0041, 0.00103))  # 3 % slower is noise
    run.train(1, 100)
    assert run.counts == (48, 48) and run.auto.history == [(1, (48, 48))]
    lines = "4 + 1 n ms on rank 0, 4.1 + 1.03 n ms on rank 1"
    assert run.said == [f"shards=auto: using equal shards, because a step with n samples takes {lines}"]


def test_a_rank_that_is_half_as_fast_gets_about_half_as_much() -> None:
    run = Simulated(QUICK, HALF)
    run.real = [QUICK, HALF]
    assert run.counts == (66, 30) and run.auto.history[-1] == (1, (66, 30))
    prefix = "shards=auto: using shards [66,30] from step 1, because a step with n samples takes 4 + 1 n ms on"
    assert run.said[0].startswith(prefix)
    assert run.said[0].endswith("this reduces the step time of the slowest rank to 67% of its previous value")
    run.train(1, 100)
    assert len(run.said) == 1
    run.auto.history = [(1, (48, 48)), (11, (66, 30))]
    assert run.auto.average_local_samples(1, 20) == 57, "the first ten steps with 48, then 66"
    assert run.auto.average_local_samples(11, 20) == 66, "a resumed attempt has seen no other"


def test_a_disturbance_in_mid_run_is_answered_within_thirty_steps_and_its_end_too() -> None:
    run = Simulated(QUICK, QUICK)
    run.train(1, 46)
    run.real = [QUICK, HALF]
    run.train(47, 30)
    assert run.counts == (66, 30)
    run.real = [QUICK, QUICK]
    run.train(77, 30)
    assert run.counts[0] in (47, 48, 49) and run.auto.history[0] == (1, (48, 48))


def test_a_measurement_in_a_busy_moment_is_corrected() -> None:
    """Rank 1 was measured while another program held its core: three times as slow as it is."""
    run = Simulated(QUICK, StepTimeModel(0.012, 0.003))
    assert run.counts[1] < 24
    run.train(1, 2 * WINDOW)
    assert abs(run.counts[1] - 48) <= 1
