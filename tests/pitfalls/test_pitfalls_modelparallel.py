"""Mistakes of tutorials on model parallelism: what they do, and what is correct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common.checkpoint import storage
from common.models import model_file
from common.models.networks import ResNet, SimpleNN
from common.runs.folder import RunFolder
from common.techniques.pipeline import partition
from common.techniques.pipeline.single_process import SingleProcessPipeline
from tests.harness.commands.processes import run_experiment
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import ENTRY_BY_NAME


def count_parameters(parts: Sequence[nn.Module]) -> list[dict[str, int]]:
    """Count the parameters of each part by the kind of their device."""
    counts = []
    for part in parts:
        count: Counter[str] = Counter()
        for parameter in part.parameters():
            count[parameter.device.type] += parameter.numel()
        counts.append(dict(count))
    return counts


def test_moving_the_placed_model_puts_both_parts_on_one_device() -> None:
    model = SimpleNN()
    sizes = [128 * 784 + 128, 64 * 128 + 64 + 10 * 64 + 10]
    parts = partition.split_into_stages(model, ["fc2"])
    for part, device in zip(parts, ("cpu", "meta"), strict=True):
        part.to(device)
    assert count_parameters(parts) == [{"cpu": sizes[0]}, {"meta": sizes[1]}]
    model.to("meta")  # the usual line after building a model
    assert count_parameters(parts) == [{"meta": sizes[0]}, {"meta": sizes[1]}], "no memory is saved, without a warning"


class TwoDevices(nn.Module):
    """The common example of two linear layers, each moved to its device."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10).to(first)
        self.net2 = nn.Linear(10, 5).to(second)
        self.devices = (first, second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net1(x.to(self.devices[0])).relu()
        return cast(torch.Tensor, self.net2(hidden.to(self.devices[1])))


def test_two_halves_on_one_device_are_the_unsplit_model(finished: GetRun) -> None:
    sizes = [10 * 10 + 10, 5 * 10 + 5]
    split = TwoDevices("cpu", "meta")
    assert count_parameters([split.net1, split.net2]) == [{"cpu": sizes[0]}, {"meta": sizes[1]}]
    same = TwoDevices("cpu", "cpu")
    assert count_parameters([same.net1, same.net2]) == [{"cpu": sizes[0]}, {"cpu": sizes[1]}]
    x = torch.randn(4, 10)
    unsplit = nn.Sequential(same.net1, nn.ReLU(), same.net2)
    assert same(x).device.type == "cpu"
    assert torch.equal(same(x), unsplit(x)), "there is no warning"

    pipeline = SingleProcessPipeline(
        [nn.Sequential(same.net1), nn.Sequential(nn.ReLU(), same.net2)],
        F.cross_entropy,
        same.devices,
        size=1,
        microbatches=4,
        schedule="gpipe",
        pipelined=True,
        dtype=torch.float32,
    )
    pipeline.step(x, torch.arange(4))
    spans: list[tuple[float, float]] = []
    for steps in pipeline.collect_spans():
        spans += [(span.start, span.end) for span in steps[0]]
    assert len(spans) == 2 * 2 * 4
    for span, following in pairwise(sorted(spans)):
        assert span[1] <= following[0], "one half works at a time"
    check_that_ranks_have_only_their_stage(finished(ENTRY_BY_NAME["resnet_modelparallel"]).folder)


def check_that_ranks_have_only_their_stage(folder: RunFolder) -> None:
    checkpoint = storage.list_resumable_checkpoints(folder)[0].path
    first, second = (torch.load(checkpoint / f"rank-{rank}.pt", weights_only=True)["model"] for rank in range(2))
    assert first
    assert second
    assert not first.keys() & second.keys()
    assert first.keys() | second.keys() == model_file.read_model(folder)[1].keys()


class DoublyRegisteredResNet(ResNet):
    """The common example: a ResNet whose layers become attributes a second time."""

    def __init__(self) -> None:
        super().__init__("resnet18", (3, 16, 16), 5, width=4)
        layers = list(self)
        half = len(layers) // 2
        self.seq1 = nn.Sequential(*layers[:half])
        self.seq2 = nn.Sequential(*layers[half:])


def test_layers_registered_twice_stand_twice_in_the_state_dict() -> None:
    model = ResNet("resnet18", (3, 16, 16), 5, width=4)
    doubled = DoublyRegisteredResNet()
    assert len(doubled.state_dict()) == 2 * len(model.state_dict())
    assert len(list(doubled.parameters())) == len(list(model.parameters())), "the optimizer has each parameter once"
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(doubled.state_dict())
    names: list[str] = []
    for stage in partition.split_into_stages(model, ["layer3_0"]):
        names += stage.state_dict()
    assert names == list(model.state_dict())


def test_pieces_of_a_batch_are_concatenated_not_summed() -> None:
    model = SimpleNN()
    x = torch.randn(8, 28, 28)
    y = torch.randint(10, (8,))
    outputs = [model(microbatch) for microbatch in x.split(2)]
    summed = torch.stack(outputs).sum(0)
    assert summed.shape == (2, 10), "the output of a quarter of the batch"
    assert F.cross_entropy(summed, y[:2]).isfinite(), "a loss with two labels is computed without an error"
    assert torch.allclose(torch.cat(outputs), model(x), atol=1e-6)


def test_naive_stages_wait_for_each_other(tmp_path: Path, cache: Path) -> None:
    data = ("data.name=digits", f"data.cache={cache}", "data.test_limit=50")
    settings = (*data, "width=8", "batch=16", "steps=8", "launch.threads=1")  # tests run three at a time

    completed = run_experiment("resnet_modelparallel", *settings, "mode=naive", "plot=false", runs=tmp_path)
    assert completed.returncode == 0, completed.stderr
    idle_shares = completed.result["idle_share"]
    assert len(idle_shares) == 2
    assert sum(idle_shares) >= 1, "two processes do the work of one and wait for messages"


def test_outputs_of_parts_of_a_layer_are_summed_before_the_activation() -> None:
    layer = nn.Linear(12, 8, bias=False)
    x = torch.randn(4, 12)
    parts = list(zip(x.chunk(2, 1), layer.weight.chunk(2, 1), strict=True))  # each device has half of the inputs
    products = torch.stack([F.linear(inputs, weight) for inputs, weight in parts])
    sum_of_functions = products.relu().sum(0)
    function_of_sum = products.sum(0).relu()
    expected = layer(x).relu()
    assert (sum_of_functions - expected).abs().max() > 0.1
    assert torch.allclose(function_of_sum, expected, atol=1e-6)


def test_no_library_has_a_function_collect() -> None:
    for module in (torch, torch.nn, torch.nn.parallel, dist):
        assert not hasattr(module, "collect"), module
    for name in ("all_gather", "gather", "all_reduce", "reduce"):
        assert callable(getattr(dist, name))


def test_targets_on_another_device_than_the_last_stage_are_refused() -> None:
    outputs = torch.empty(4, 5, device="meta")  # the last stage of TwoDevices("cpu", "meta")
    targets = torch.zeros(4, 5)  # on the device of the inputs
    with pytest.raises(RuntimeError, match="Tensor on device cpu is not on the expected device meta"):
        F.mse_loss(outputs, targets)
    assert F.mse_loss(outputs, targets.to(outputs.device)).device == outputs.device
