"""The mistakes about the batches of several ranks: what they really do, and what is right instead."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from common.training import optimizers
from configs.shared import Optim
from tests.harness.batch_pitfalls import BATCH, SAMPLES
from tests.harness.ddp_pitfalls import made

STEPS = SAMPLES // BATCH


@pytest.fixture(scope="module")
def epochs(cache: Path) -> list[dict[str, Any]]:
    """What each of two ranks found in an epoch with each mistake and without."""
    return list(made("epochs", module="batch_pitfalls", CACHE=str(cache))["epochs"])


def drawn(epochs: list[dict[str, Any]], name: str) -> list[list[int]]:
    """The samples of each step, over both ranks."""
    return [[*one, *two] for one, two in zip(*(rank[name]["seen"] for rank in epochs), strict=True)]


def test_without_a_sampler_two_ranks_do_the_work_of_one(epochs: list[dict[str, Any]]) -> None:
    steps = drawn(epochs, "no sampler")
    assert [(len(step), len(set(step))) for step in steps] == [(2 * BATCH, BATCH)] * STEPS, "each sample is there twice"
    for rank in epochs:
        assert sorted(chain(*rank["no sampler"]["seen"])) == list(range(SAMPLES)), "every rank passes through all"
        assert rank["no sampler"]["apart"][0] < 1e-12, "one process with the batch of one rank learns the same"
    right = drawn(epochs, "right")
    assert [(len(step), len(set(step))) for step in right] == [(BATCH, BATCH)] * STEPS
    assert sorted(chain(*right)) == list(range(SAMPLES)), "both together pass through all"


def test_the_batch_of_a_rank_is_not_that_of_a_step(epochs: list[dict[str, Any]]) -> None:
    steps = drawn(epochs, "batch per rank")
    assert [len(set(step)) for step in steps] == [2 * BATCH] * (STEPS // 2), "twice the batch, in half as many steps"
    for rank in epochs:
        twice, same = rank["batch per rank"]["apart"]
        assert twice < 1e-12 < 1e-3 < same, "one process with twice the batch does that, and not one with the batch"
        assert [len(step) for step in rank["right"]["seen"]] == [BATCH // 2] * STEPS
        assert rank["right"]["apart"][0] < 1e-12, "one process with the batch does that"
    rule = Optim(lr=0.1, base_batch=BATCH, decay="constant")  # where the larger batch is wanted
    assert optimizers.compute_learning_rate(rule, 0, STEPS, 2 * BATCH) == pytest.approx(0.2)
