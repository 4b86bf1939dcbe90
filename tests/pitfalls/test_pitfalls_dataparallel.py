"""Mistakes with nn.DataParallel: what they do, and what this repository does instead."""

from __future__ import annotations

import importlib
import unittest.mock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.checkpoint import state_dicts
from common.models.networks import SimpleNN
from common.techniques.data_parallel import ddp


class OnTheCpu(nn.DataParallel):
    """nn.DataParallel with its forward and copies of the model, but without transfers between GPUs."""

    def __init__(self, module: nn.Module, devices: int) -> None:
        super().__init__(module)
        self.device_ids = list(range(devices))
        self.dim = 0
        self.output_device = 0
        self.src_device_obj = torch.device("cpu")
        self.copies: list[Any] = []

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Any) -> Any:
        chunks = inputs[0].chunk(len(device_ids))  # the chunks of torch's comm.scatter
        return [(chunk,) for chunk in chunks], [{} for _ in chunks]

    def replicate(self, module: Any, device_ids: Any) -> list[Any]:
        def broadcast(tensors: Any, devices: Any, detach: bool = False) -> Any:
            """Copy the tensors for all devices but the first, which has them."""
            copies = [list(tensors)]
            for _ in devices[1:]:
                copies.append([tensor.clone() for tensor in tensors])
            return copies

        replicating = importlib.import_module("torch.nn.parallel.replicate")
        with unittest.mock.patch.object(replicating, "_broadcast_coalesced_reshape", broadcast):
            return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        self.copies = list(replicas)
        return [replica(*arguments) for replica, arguments in zip(replicas, inputs, strict=True)]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat(outputs)


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize(
    ("count", "devices", "sizes"), [(6, 2, [3, 3]), (5, 2, [3, 2]), (5, 4, [2, 2, 1]), (1, 4, [1])]
)
def test_data_parallel_takes_batches_that_do_not_divide(count: int, devices: int, sizes: list[int]) -> None:
    model = SimpleNN().double()
    wrapped = OnTheCpu(model, devices)
    x = torch.randn(count, 28, 28, dtype=torch.float64)
    y = torch.arange(count)
    logits = wrapped(x)
    assert len(wrapped.copies) == len(sizes), "a device without samples has no copy"
    assert torch.allclose(logits, model(x), atol=1e-12, rtol=0)
    loss = F.cross_entropy(logits, y)
    expected = gradients(model, F.cross_entropy(model(x), y))
    torch.testing.assert_close(gradients(model, loss), expected, atol=1e-12, rtol=0)
    # a mean of the means of devices needs equal shards
    means = [F.cross_entropy(*shard) for shard in zip(logits.split(sizes), y.split(sizes), strict=True)]
    has_unequal_shards = len(set(sizes)) > 1
    is_equal = torch.isclose(torch.stack(means).mean(), loss, atol=1e-12, rtol=0).item()
    assert is_equal != has_unequal_shards


def test_data_parallel_forgets_what_batchnorm_saw_on_other_devices() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    x = torch.randn(8, 3, 4, 4) * torch.arange(1, 9).view(-1, 1, 1, 1)
    wrapped = OnTheCpu(model, 2)
    wrapped(x)
    first: Any = nn.BatchNorm2d(3)
    first(x[:4])
    norm: Any = model[0]
    assert torch.equal(norm.running_var, first.running_var)
    discarded: Any = wrapped.copies[1][0]
    assert (discarded.running_var > 2 * norm.running_var).all(), "the second device has larger values"
    wrapped(x)
    assert wrapped.copies[1][0].running_var.data_ptr() != discarded.running_var.data_ptr()


def test_a_wrapper_changes_the_names_in_a_checkpoint() -> None:
    model = SimpleNN()
    other = SimpleNN()
    saved = nn.DataParallel(model).state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"fc1.weight"'):
        other.load_state_dict(saved)
    other.load_state_dict(ddp.unwrap_ddp(nn.DataParallel(model)).state_dict())
    state_dicts.load_tensors(other.named_parameters(), saved)
    for parameter, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, loaded)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_data_parallel_without_gpus_says_nothing() -> None:
    model = SimpleNN()
    x = torch.randn(4, 28, 28)
    assert torch.equal(nn.DataParallel(model)(x), model(x))
    with pytest.raises(RuntimeError, match="device type"):  # the function raises an error
        nn.parallel.data_parallel(model, x)
