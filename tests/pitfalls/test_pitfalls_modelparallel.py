"""The mistakes of tutorials on model parallelism: what they really do, and what is right instead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.checkpoint import storage
from common.models import model_file
from common.models.networks import ResNet, SimpleNN
from common.techniques.pipeline import partition
from common.techniques.pipeline.single_process import SingleProcessPipeline
from tests.harness.processes import run
from tests.harness.registry import BY_NAME
from tests.harness.shared import Make


def held(parts: Sequence[nn.Module]) -> list[dict[str, int]]:
    """Parameters of each part by the kind of device they are on."""
    found: list[dict[str, int]] = []
    for part in parts:
        found.append({})
        for value in part.parameters():
            found[-1][value.device.type] = found[-1].get(value.device.type, 0) + value.numel()
    return found


def test_moving_the_placed_model_puts_both_parts_on_one_device() -> None:
    model = SimpleNN()
    sizes = [128 * 784 + 128, 64 * 128 + 64 + 10 * 64 + 10]
    parts = partition.split_into_stages(model, ["fc2"])
    for part, device in zip(parts, ("cpu", "meta"), strict=True):
        part.to(device)
    assert held(parts) == [{"cpu": sizes[0]}, {"meta": sizes[1]}]
    model.to("meta")  # the usual line after building a model
    assert held(parts) == [{"meta": sizes[0]}, {"meta": sizes[1]}], "nothing is saved, and nothing tells"


class TwoDevices(nn.Module):
    """The well-known example of two linear layers, each moved to its device."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 10).to(first), nn.Linear(10, 5).to(second)
        self.devices = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net1(x.to(self.devices[0])).relu()
        return cast(torch.Tensor, self.net2(hidden.to(self.devices[1])))


def test_two_halves_on_one_device_are_the_unsplit_model(finished: Make) -> None:
    sizes = [10 * 10 + 10, 5 * 10 + 5]
    split, same = TwoDevices("cpu", "meta"), TwoDevices("cpu", "cpu")
    assert held([split.net1, split.net2]) == [{"cpu": sizes[0]}, {"meta": sizes[1]}]
    assert held([same.net1, same.net2]) == [{"cpu": size} for size in sizes], "one device holds everything"
    x = torch.randn(4, 10)
    whole = nn.Sequential(same.net1, nn.ReLU(), same.net2)
    assert same(x).device.type == "cpu" and torch.equal(same(x), whole(x)), "and nothing tells"

    halves = [nn.Sequential(same.net1), nn.Sequential(nn.ReLU(), same.net2)]
    how: Any = {"size": 1, "microbatches": 4, "schedule": "gpipe", "pipelined": True, "dtype": torch.float32}
    pipe = SingleProcessPipeline(halves, F.cross_entropy, same.devices, **how)
    pipe.step(x, torch.arange(4))
    spans = sorted((span.start, span.end) for steps in pipe.collect_spans() for span in steps[0])
    assert len(spans) == 2 * 2 * 4 and all(a[1] <= b[0] for a, b in pairwise(spans)), "one half works at a time"
    folder = finished(BY_NAME["resnet_modelparallel"]).folder
    checkpoint = storage.list_resumable_checkpoints(folder)[0].path
    one, two = (torch.load(checkpoint / f"rank-{rank}.pt", weights_only=True)["model"] for rank in range(2))
    assert one and two and not one.keys() & two.keys(), "a rank holds its own stage and nothing else"
    assert one.keys() | two.keys() == model_file.read_model(folder)[1].keys()


def test_layers_registered_twice_stand_twice_in_the_state_dict() -> None:
    whole = ResNet("resnet18", (3, 16, 16), 5, width=4)

    class Parallel(ResNet):
        """The well-known example: a ResNet whose layers become attributes a second time."""

        def __init__(self) -> None:
            super().__init__("resnet18", (3, 16, 16), 5, width=4)
            half = len(self) // 2
            self.seq1, self.seq2 = nn.Sequential(*list(self)[:half]), nn.Sequential(*list(self)[half:])

    doubled = Parallel()
    assert len(doubled.state_dict()) == 2 * len(whole.state_dict())
    assert len(list(doubled.parameters())) == len(list(whole.parameters())), "the optimizer does not notice"
    with pytest.raises(RuntimeError, match="Unexpected key"):
        whole.load_state_dict(doubled.state_dict())
    stages = partition.split_into_stages(whole, ["layer3_0"])
    assert [name for stage in stages for name in stage.state_dict()] == list(whole.state_dict())


def test_pieces_of_a_batch_are_concatenated_not_summed() -> None:
    model, x, y = SimpleNN(), torch.randn(8, 28, 28), torch.randint(10, (8,))
    outputs = [model(piece) for piece in x.split(2)]
    summed = torch.stack(outputs).sum(0)
    assert summed.shape == (2, 10), "the output of a quarter of the batch"
    assert F.cross_entropy(summed, y[:2]).isfinite(), "with labels of as many samples it trains on nonsense"
    assert torch.allclose(torch.cat(outputs), model(x), atol=1e-6)


def test_naive_stages_wait_for_each_other(tmp_path: Path, cache: Path) -> None:
    data = ("data.name=digits", f"data.cache={cache}", "data.test_limit=50")
    words = (*data, "width=8", "batch=16", "steps=8", "launch.threads=1")  # tests run three at a time

    def shares(mode: str) -> list[float]:
        done = run("resnet_modelparallel", *words, f"mode={mode}", "plot=false", runs=tmp_path / mode)
        assert done.status == 0, done.err
        return [1 - idle for idle in done.result["idle_share"]]

    assert sum(shares("naive")) <= 1, "two processes do no more than one, and wait for messages besides"
    assert sum(shares("single")) == pytest.approx(1, abs=0.05)
