"""The mistakes of common tutorials: what they really do, and the right line beside each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common import schedules, splits
from common.evaluate import batches
from common.models import SimpleNN
from tests.helpers import run


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
    assert torch.equal(chain(splits.cut(model, ["fc2"]), images), model(images))


def test_split_without_relu_is_one_linear_layer() -> None:
    a, b, zero = torch.randn(4, 784), torch.randn(4, 784), torch.zeros(4, 784)

    def gap(f: Any) -> Any:
        """0 for an affine function: f(a + b) + f(0) = f(a) + f(b)."""
        return (f(a + b) + f(zero) - f(a) - f(b)).abs().max().item()

    stages = tutorial_stages()
    assert gap(lambda x: chain(stages, x)) < 1e-5
    right = splits.cut(SimpleNN(), ["fc2"])
    assert gap(lambda x: chain(right, x.view(-1, 28, 28))) > 1e-2


def test_halves_of_two_models_are_neither_of_them() -> None:
    images = torch.randn(4, 28, 28)
    one, two = SimpleNN(), SimpleNN()
    mixed = [splits.cut(one, ["fc2"])[0], splits.cut(two, ["fc2"])[1]]
    for model in (one, two):
        assert not torch.allclose(chain(mixed, images), model(images))
        assert torch.equal(chain(splits.cut(model, ["fc2"]), images), model(images))


def overlap(timeline: list[dict[str, Any]]) -> float:
    """Seconds of one step in which both processes compute."""
    spans = [[(s["start"], s["end"]) for s in timeline if s["process"] == p] for p in (0, 1)]
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans[0] for c, d in spans[1])


def test_moving_tensors_from_stage_to_stage_is_no_pipeline(tmp_path: Path, digits: tuple[str, ...]) -> None:
    found = {}
    for schedule in ("naive", "gpipe"):
        wide = (*digits, "width=512", "batch=256", f"schedule={schedule}")
        done = run("mnist_pipeline", *wide, runs=tmp_path / schedule)
        assert done.status == 0, done.err
        found[schedule] = overlap(done.folder.result["timeline"]) / sum(
            span["end"] - span["start"] for span in done.folder.result["timeline"]
        )
    assert found["naive"] < 0.01 < found["gpipe"]
    for stages in (2, 4, 8):
        assert schedules.idle_share(schedules.play(schedules.naive(stages, stages, 4), stages)) == 1 - 1 / stages


def test_mean_of_batch_means_is_not_the_mean_over_samples() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(100, 10), torch.randint(10, (100,))
    logits[-4:] *= 10  # the ragged last batch is a hard one
    pieces = list(batches(100, 32))
    assert [piece.stop - piece.start for piece in pieces] == [32, 32, 32, 4]
    means = [F.cross_entropy(logits[p], labels[p]) for p in pieces]
    sums = [F.cross_entropy(logits[p], labels[p], reduction="sum") for p in pieces]
    exact = F.cross_entropy(logits, labels).item()
    assert sum(sums).item() / 100 == pytest.approx(exact, rel=1e-5)  # type: ignore[union-attr]
    assert sum(means).item() / len(means) > exact * 1.5  # type: ignore[union-attr]
