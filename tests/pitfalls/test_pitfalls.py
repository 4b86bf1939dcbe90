"""The mistakes of common tutorials: what they really do, and what is right instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from common.data import loader as data
from common.data.prepare import prepare_digits
from common.models.networks import SimpleNN
from common.techniques.pipeline import partition, schedules
from common.training.evaluate import slice_batches
from tests.harness.ddp_pitfalls import SECONDS, made
from tests.harness.processes import run


def tutorial_stages() -> list[nn.Module]:
    """A familiar split: each half is built on its own, with its layers but without what stood between them."""
    return [nn.Sequential(nn.Linear(784, 128)), nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 10))]


def chain(stages: list[Any], x: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = stage(x)
    return x


def test_split_without_flatten_does_not_take_images() -> None:
    images = torch.randn(4, 28, 28)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chain(tutorial_stages(), images)
    model = SimpleNN()
    assert torch.equal(chain(partition.split_into_stages(model, ["fc2"]), images), model(images))


def test_split_without_relu_is_one_linear_layer() -> None:
    a, b, zero = torch.randn(4, 784), torch.randn(4, 784), torch.zeros(4, 784)

    def gap(f: Any) -> Any:
        """0 for an affine function: f(a + b) + f(0) = f(a) + f(b)."""
        return (f(a + b) + f(zero) - f(a) - f(b)).abs().max().item()

    stages = tutorial_stages()
    assert gap(lambda x: chain(stages, x)) < 1e-5
    right = partition.split_into_stages(SimpleNN(), ["fc2"])
    assert gap(lambda x: chain(right, x.view(-1, 28, 28))) > 1e-2


def test_halves_of_two_models_are_neither_of_them() -> None:
    images = torch.randn(4, 28, 28)
    one, two = SimpleNN(), SimpleNN()
    mixed = [partition.split_into_stages(one, ["fc2"])[0], partition.split_into_stages(two, ["fc2"])[1]]
    for model in (one, two):
        assert not torch.allclose(chain(mixed, images), model(images))
        assert torch.equal(chain(partition.split_into_stages(model, ["fc2"]), images), model(images))


def overlap(timeline: list[dict[str, Any]]) -> float:
    """Seconds of one step in which both processes compute."""
    spans = [[(s["start"], s["end"]) for s in timeline if s["rank"] == p] for p in (0, 1)]
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans[0] for c, d in spans[1])


def test_moving_tensors_from_stage_to_stage_is_no_pipeline(tmp_path: Path, digits: tuple[str, ...]) -> None:
    def measured(schedule: str, attempt: int) -> float:
        """The share of all computing in which both ranks compute."""
        # a microbatch takes longer than a busy processor's time slices, so that they do not hide the overlap
        wide = (*digits, "width=1536", "batch=512", "steps=4", f"schedule={schedule}")
        done = run("mnist_pipeline", *wide, runs=tmp_path / f"{schedule}-{attempt}")
        assert done.status == 0, done.err
        timeline = done.result["timeline"]
        return overlap(timeline) / sum(span["end"] - span["start"] for span in timeline)

    assert measured("naive", 0) < 0.01
    # with one processor to share, even a pipeline's stages take turns: a busy machine is measured again
    assert any(measured("gpipe", attempt) > 0.01 for attempt in range(4))
    for stages in (2, 4, 8):
        spans = schedules.simulate_schedule(schedules.make_naive_schedule(stages, stages, 4), stages)
        assert schedules.compute_bubble(spans) == 1 - 1 / stages


def test_mean_of_batch_means_is_not_the_mean_over_samples() -> None:
    logits, labels = torch.randn(100, 10), torch.randint(10, (100,))
    logits[-4:] *= 10  # the ragged last batch is a hard one
    pieces = list(slice_batches(100, 32))
    assert [piece.stop - piece.start for piece in pieces] == [32, 32, 32, 4]
    means = [F.cross_entropy(logits[p], labels[p]) for p in pieces]
    sums = [F.cross_entropy(logits[p], labels[p], reduction="sum") for p in pieces]
    exact = F.cross_entropy(logits, labels).item()
    assert sum(sums).item() / 100 == pytest.approx(exact, rel=1e-5)  # type: ignore[union-attr]
    assert sum(means).item() / len(means) > exact * 1.5  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def mistakes() -> dict[str, Any]:
    """All of them, in one launch. Ranks in a loop come last: they leave their process half in a group."""
    names = ["group_in_a_function_that_returns", "barrier_on_one_rank", "several_devices", "model_parallelism"]
    return made(*names, "ranks_in_a_loop")


def test_ranks_in_a_loop_wait_for_ever(mistakes: dict[str, Any]) -> None:
    found = mistakes["ranks_in_a_loop"]
    assert found["began"] == [0], "rank 1 is never reached: rank 0 waits for it"
    assert found["loop"]["seconds"] >= SECONDS
    assert found["together"] == [2, 2]


def test_a_group_does_not_outlive_the_processes_that_made_it(mistakes: dict[str, Any]) -> None:
    found = mistakes["group_in_a_function_that_returns"]
    assert found["inside"] == [True, True] and found["after"] is False
    assert "process group has not been initialized" in found["use"]["error"]


def test_a_barrier_on_one_rank_hangs_both(mistakes: dict[str, Any]) -> None:
    found = mistakes["barrier_on_one_rank"]
    assert all("error" in answer for answer in found["one"])
    assert max(answer["seconds"] for answer in found["one"]) >= SECONDS
    assert found["all"] == [2.0, 2.0]


def test_a_ddp_process_has_one_device(mistakes: dict[str, Any]) -> None:
    for wrong, right in mistakes["several_devices"]:
        assert "device_ids" in wrong["error"]
        assert right == "DistributedDataParallel"


def test_ddp_does_not_split_the_model(mistakes: dict[str, Any]) -> None:
    whole = sum(parameter.numel() for parameter in SimpleNN().parameters())
    for ddp, fsdp in mistakes["model_parallelism"]:
        assert ddp == whole
        assert 0.45 * whole < fsdp < 0.55 * whole


def test_without_set_epoch_every_epoch_has_the_same_order(cache: Path) -> None:
    sampler: Any = DistributedSampler(range(100), num_replicas=2, rank=0, shuffle=True)  # type: ignore[arg-type]
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    images = data.Images(prepare_digits(cache), "train", limit=100)
    loader = data.Loader(images, 10, 0, torch.device("cpu"), torch.float32, shard=(0, 2))
    epochs = [[label for _, y in loader for label in y.tolist()] for _ in range(2)]
    assert epochs[0] != epochs[1], "the order follows from the epoch, and nobody has to say which one it is"


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))
