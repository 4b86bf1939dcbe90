"""Learning rates of a run: warm-up, decay, and the linear scaling rule."""

from __future__ import annotations

import pytest

from common.training.learning_rate import compute_learning_rate
from configs.shared import Optim


def compute_rates(settings: Optim, steps: int, total: int) -> list[float]:
    """Return the learning rates of the first steps of a run with 64 samples per batch."""
    return [compute_learning_rate(settings, step, total, batch=64) for step in range(steps)]


def test_warm_up_cosine_and_the_linear_scaling_rule() -> None:
    settings = Optim(lr=0.1, warmup=2, decay="cosine", base_batch=32)
    rates = [0.1, 0.2, 0.2, 0.2 * (2 + 2**0.5) / 4, 0.1, 0.2 * (2 - 2**0.5) / 4, 0]
    assert compute_rates(settings, steps=7, total=6) == pytest.approx(rates)


def test_a_run_may_end_before_its_warm_up() -> None:
    assert compute_learning_rate(Optim(lr=0.1, warmup=10), 4, 3, 64) == pytest.approx(0.05)


def test_linear_decay_ends_at_zero() -> None:
    assert compute_rates(Optim(lr=0.1), steps=5, total=4) == pytest.approx([0.1, 0.075, 0.05, 0.025, 0])


def test_a_constant_rate_does_not_decay() -> None:
    assert compute_learning_rate(Optim(lr=0.1, decay="constant"), 3, 4, 64) == 0.1


def test_decay_in_steps_is_a_tenth_after_half_and_a_hundredth_after_three_quarters() -> None:
    settings = Optim(lr=1, warmup=2, decay="step")
    rates = [0.5, 1, 1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    assert compute_rates(settings, steps=10, total=10) == pytest.approx(rates)
