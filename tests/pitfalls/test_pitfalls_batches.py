"""Mistakes with batches of several ranks: what they do, and what is correct."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from common.models.networks import SimpleNN
from common.techniques.data_parallel.shards import StepTimeModel, choose_shard_sizes, predict_slowest_rank_seconds
from common.training import learning_rate
from common.training.evaluate import slice_shard
from configs.shared import Optim
from tests.harness.pitfalls.batch_pitfalls import BATCH, SAMPLES
from tests.harness.pitfalls.outcomes import collect_outcome

STEPS = SAMPLES // BATCH


@pytest.fixture(scope="module")
def epochs(cache: Path) -> list[dict[str, Any]]:
    """The samples and distances of each of two ranks in an epoch, by case."""
    return list(collect_outcome("batch_pitfalls", "train_epochs", CACHE=str(cache)))


def list_samples(epochs: list[dict[str, Any]], case: str) -> list[list[int]]:
    """Return the samples of each step, over both ranks."""
    first, second = (rank[case]["samples"] for rank in epochs)
    return [samples + other_samples for samples, other_samples in zip(first, second, strict=True)]


def count_samples(steps: list[list[int]]) -> list[tuple[int, int]]:
    """Return the number of samples and the number of different samples of each step."""
    return [(len(step), len(set(step))) for step in steps]


def test_without_a_sampler_all_ranks_train_on_the_same_samples(epochs: list[dict[str, Any]]) -> None:
    steps = list_samples(epochs, "no sampler")
    assert count_samples(steps) == [(2 * BATCH, BATCH)] * STEPS, "both ranks have the same samples"
    for rank in epochs:
        assert sorted(chain(*rank["no sampler"]["samples"])) == list(range(SAMPLES)), "every rank trains on all samples"
        assert rank["no sampler"]["distances"][0] < 1e-12, "one process with the batch of one rank has the same weights"
    correct_steps = list_samples(epochs, "correct")
    assert count_samples(correct_steps) == [(BATCH, BATCH)] * STEPS
    assert sorted(chain(*correct_steps)) == list(range(SAMPLES)), "both ranks together train on all samples once"


def test_the_batch_size_of_a_rank_is_not_the_global_batch_size(epochs: list[dict[str, Any]]) -> None:
    steps = list_samples(epochs, "batch per rank")
    assert [len(set(step)) for step in steps] == [2 * BATCH] * (STEPS // 2), "twice the batch, in half as many steps"
    for rank in epochs:
        distance_from_double_batch, distance_from_batch = rank["batch per rank"]["distances"]
        assert distance_from_double_batch < 1e-12
        assert distance_from_batch > 1e-3
        assert [len(step) for step in rank["correct"]["samples"]] == [BATCH // 2] * STEPS
        assert rank["correct"]["distances"][0] < 1e-12, "one process with the global batch has the same weights"
    settings = Optim(lr=0.1, base_batch=BATCH, decay="constant")  # scales the learning rate for the larger batch
    assert learning_rate.compute_learning_rate(settings, 0, STEPS, 2 * BATCH) == pytest.approx(0.2)


def test_the_mean_of_unequal_shards_means_is_another_gradient() -> None:
    x = torch.randn(24, 5, dtype=torch.float64)
    y = torch.randint(3, (24,))
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def compute_gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, weight)[0]

    expected = compute_gradient(F.cross_entropy(x @ weight.T, y))
    mean_of_means = torch.zeros_like(weight)
    mean_of_sums = torch.zeros_like(weight)
    for images, labels in zip(x.split([18, 6]), y.split([18, 6]), strict=True):
        logits = images @ weight.T
        loss = F.cross_entropy(logits, labels, reduction="sum")
        mean_of_sums = mean_of_sums + compute_gradient(loss / 12) / 2  # a shard has 12 samples on average
        mean_of_means = mean_of_means + compute_gradient(F.cross_entropy(images @ weight.T, labels)) / 2
    assert (mean_of_means - expected).abs().max() > 1e-3
    assert (mean_of_sums - expected).abs().max() < 1e-12


def test_statistics_of_the_smallest_shard_are_not_those_of_the_batch() -> None:
    """Measure the mean squared distance from the mean of the batch, over many batches."""
    x = torch.randn(1000, 24, dtype=torch.float64)
    large = x[:, :21].mean(1)
    small = x[:, 21:].mean(1)
    batch_mean = x.mean(1)

    def compute_distance(means: torch.Tensor) -> float:
        return (means - batch_mean).square().mean().item()

    assert compute_distance((21 * large + 3 * small) / 24) < 1e-12
    assert compute_distance(small) > 2 * compute_distance((large + small) / 2) > 0.05

    def compute_running_variance(means: torch.Tensor) -> float:
        norm: Any = nn.BatchNorm1d(1, momentum=1.0).double()
        norm(means[:, None])
        return float(norm.running_var)

    # the mean of a shard varies more if the shard has fewer samples
    assert compute_running_variance(small) > 3 * compute_running_variance(large)


def test_shards_chosen_on_a_busy_machine_are_too_uneven_on_an_idle_one() -> None:
    quiet = [StepTimeModel(0.0, 0.001), StepTimeModel(0.0, 0.001)]
    disturbed_shards = choose_shard_sizes([quiet[0], quiet[1].rescale_line(48, 3 * 0.048)], 96)
    quiet_seconds = predict_slowest_rank_seconds(quiet, (48, 48))
    assert predict_slowest_rank_seconds(quiet, disturbed_shards) == pytest.approx(1.5 * quiet_seconds)
    corrected = [speed.rescale_line(count, count * 0.001) for speed, count in zip(quiet, disturbed_shards, strict=True)]
    assert choose_shard_sizes(corrected, 96) == (48, 48), "measured steps replace the first measurement"


def test_the_loss_of_one_shard_is_not_the_loss_of_the_batch() -> None:
    torch.manual_seed(0)
    model = SimpleNN(16)
    x = torch.randn(64, 28, 28)
    y = torch.randint(10, (64,))
    loss = F.cross_entropy(model(x), y)
    losses = torch.stack([F.cross_entropy(model(x[shard]), y[shard]) for shard in (slice(0, 32), slice(32, 64))])
    assert (losses - loss).abs().min() > 1e-3, "each rank would print another number"
    assert torch.allclose(losses.mean(), loss)


def test_the_padding_of_the_sampler_counts_samples_twice_in_an_evaluation() -> None:
    samples = 101
    is_correct = torch.zeros(samples)
    is_correct[0] = 1
    evaluated: list[int] = []
    for rank in range(2):
        sampler: Any = DistributedSampler(range(samples), 2, rank, shuffle=False)  # type: ignore[arg-type]
        evaluated += sampler
    assert len(evaluated) == samples + 1
    assert evaluated.count(0) == 2, "the first sample is evaluated by both ranks"
    assert is_correct[evaluated].mean() > 1.9 * is_correct.mean()

    correct: list[int] = []
    for rank in range(2):
        for batch in slice_shard(samples, 16, rank, 2):
            correct += range(batch.start, batch.stop)
    assert sorted(correct) == list(range(samples))
