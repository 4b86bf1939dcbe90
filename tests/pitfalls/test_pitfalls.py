"""Mistakes of common tutorials: what they do, and what is correct."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from common.data import loader as data
from common.data.prepare import prepare_digits
from common.data.samples import Images
from common.models.networks import SimpleNN
from common.techniques.pipeline import partition, schedules
from common.training.evaluate import slice_batches
from tests.harness.commands.processes import run_experiment
from tests.harness.pitfalls.outcomes import TIMEOUT_SECONDS, collect_outcomes


def build_tutorial_stages() -> list[nn.Module]:
    """Build each half of the model separately, without the flatten and the ReLU between the layers."""
    return [nn.Sequential(nn.Linear(784, 128)), nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 10))]


def chain(stages: list[Any], x: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = stage(x)
    return x


def test_split_without_flatten_does_not_take_images() -> None:
    images = torch.randn(4, 28, 28)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chain(build_tutorial_stages(), images)
    model = SimpleNN()
    assert torch.equal(chain(partition.split_into_stages(model, ["fc2"]), images), model(images))


def test_split_without_relu_is_one_linear_layer() -> None:
    a = torch.randn(4, 784)
    b = torch.randn(4, 784)
    zero = torch.zeros(4, 784)

    def measure_nonlinearity(f: Any) -> Any:
        """Return 0 for an affine function: f(a + b) + f(0) = f(a) + f(b)."""
        return (f(a + b) + f(zero) - f(a) - f(b)).abs().max().item()

    stages = build_tutorial_stages()
    assert measure_nonlinearity(lambda x: chain(stages, x)) < 1e-5
    correct_stages = partition.split_into_stages(SimpleNN(), ["fc2"])
    assert measure_nonlinearity(lambda x: chain(correct_stages, x.view(-1, 28, 28))) > 1e-2


def test_halves_of_two_models_equal_neither_model() -> None:
    images = torch.randn(4, 28, 28)
    first = SimpleNN()
    second = SimpleNN()
    first_stages = partition.split_into_stages(first, ["fc2"])
    second_stages = partition.split_into_stages(second, ["fc2"])
    outputs = chain([first_stages[0], second_stages[1]], images)
    assert not torch.allclose(outputs, first(images))
    assert not torch.allclose(outputs, second(images))
    assert torch.equal(chain(first_stages, images), first(images))
    assert torch.equal(chain(second_stages, images), second(images))


def compute_overlap(timeline: list[dict[str, Any]]) -> float:
    """Return the seconds of one step in which both ranks compute."""
    seconds = 0.0
    first_spans = [span for span in timeline if span["rank"] == 0]
    second_spans = [span for span in timeline if span["rank"] == 1]
    for first, second in itertools.product(first_spans, second_spans):
        seconds += max(0.0, min(first["end"], second["end"]) - max(first["start"], second["start"]))
    return seconds


def test_moving_tensors_from_stage_to_stage_is_no_pipeline(tmp_path: Path, digits: tuple[str, ...]) -> None:
    def measure_overlap(schedule: str, attempt: int) -> float:
        """Return the share of the computing time in which both ranks compute."""
        # a microbatch takes longer than the time slices of a busy processor, which would hide the overlap
        wide = (*digits, "width=1536", "batch=512", "steps=4", f"schedule={schedule}")
        completed = run_experiment("mnist_pipeline", *wide, runs=tmp_path / f"{schedule}-{attempt}")
        assert completed.returncode == 0, completed.stderr
        timeline = completed.result["timeline"]
        return compute_overlap(timeline) / sum(span["end"] - span["start"] for span in timeline)

    assert measure_overlap("naive", 0) < 0.01
    # on a single processor, the stages of a pipeline take turns, so a busy machine is measured again
    assert any(measure_overlap("gpipe", attempt) > 0.01 for attempt in range(4))
    for stages in (2, 4, 8):
        spans = schedules.simulate_schedule(schedules.make_naive_schedule(stages, stages, 4), stages)
        assert schedules.compute_bubble(spans) == 1 - 1 / stages


def test_mean_of_batch_means_is_not_the_mean_over_samples() -> None:
    logits = torch.randn(100, 10)
    labels = torch.randint(10, (100,))
    logits[-4:] *= 10  # the partial last batch has larger losses
    batches = list(slice_batches(100, 32))
    assert [batch.stop - batch.start for batch in batches] == [32, 32, 32, 4]
    losses = F.cross_entropy(logits, labels, reduction="none")
    exact = losses.mean().item()
    assert sum(losses[batch].sum().item() for batch in batches) / 100 == pytest.approx(exact, rel=1e-5)
    assert sum(losses[batch].mean().item() for batch in batches) / len(batches) > exact * 1.5


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """The outcomes of all mistakes, from one launch."""
    names = ["group_used_after_workers_exit", "barrier_on_one_rank", "several_device_ids", "count_parameters_per_rank"]
    names.append("ranks_in_a_loop")  # the last one, because it leaves an incomplete process group
    return collect_outcomes("ddp_pitfalls", *names)


def test_ranks_in_a_loop_wait_for_ever(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["ranks_in_a_loop"]
    assert outcome["started_ranks"] == [0], "rank 1 does not start, because rank 0 waits for it"
    assert outcome["loop"]["seconds"] >= TIMEOUT_SECONDS
    assert outcome["size_on_ranks"] == [2, 2]


def test_a_group_does_not_outlive_the_processes_that_created_it(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["group_used_after_workers_exit"]
    assert outcome["in_workers"] == [True, True]
    assert outcome["in_parent"] is False
    assert "process group has not been initialized" in outcome["all_reduce"]["error"]


def test_a_barrier_on_one_rank_hangs_both(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["barrier_on_one_rank"]
    for rank in outcome["one rank"]:
        assert "error" in rank
    assert max(rank["seconds"] for rank in outcome["one rank"]) >= TIMEOUT_SECONDS
    assert outcome["all ranks"] == [2.0, 2.0]


def test_a_ddp_process_has_one_device(outcomes: dict[str, Any]) -> None:
    for rank in outcomes["several_device_ids"]:
        assert "device_ids" in rank["outcome"]["error"]
        assert rank["correct_class"] == "DistributedDataParallel"


def test_ddp_does_not_split_the_model(outcomes: dict[str, Any]) -> None:
    count = sum(parameter.numel() for parameter in SimpleNN().parameters())
    for rank in outcomes["count_parameters_per_rank"]:
        assert rank["ddp"] == count
        assert 0.45 * count < rank["fsdp"] < 0.55 * count


def test_without_set_epoch_every_epoch_has_the_same_order(cache: Path) -> None:
    sampler: Any = DistributedSampler(range(100), num_replicas=2, rank=0, shuffle=True)  # type: ignore[arg-type]
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    images = Images(prepare_digits(cache), "train", limit=100)
    loader = data.Loader(images, 10, 0, torch.device("cpu"), torch.float32, shard=(0, 2))
    first_labels = torch.cat([y for _, y in loader])
    second_labels = torch.cat([y for _, y in loader])
    assert not torch.equal(first_labels, second_labels), "the loader counts the epochs"
