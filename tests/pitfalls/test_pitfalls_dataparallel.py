"""The mistakes about nn.DataParallel: what they really do, and what stands here instead."""

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
    """nn.DataParallel's own forward and copies of the model; what moves tensors between GPUs is replaced."""

    def __init__(self, module: nn.Module, devices: int) -> None:
        super().__init__(module)
        self.device_ids, self.dim, self.output_device = list(range(devices)), 0, 0
        self.src_device_obj = torch.device("cpu")
        self.copies: list[Any] = []

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Any) -> Any:
        chunks = inputs[0].chunk(len(device_ids))  # as torch's comm.scatter cuts
        return [(chunk,) for chunk in chunks], [{} for _ in chunks]

    def replicate(self, module: Any, device_ids: Any) -> list[Any]:
        def broadcast(tensors: Any, devices: Any, detach: bool = False) -> Any:
            """To the first device nothing has to be sent: it keeps what it has."""
            return [list(tensors), *([tensor.clone() for tensor in tensors] for _ in devices[1:])]

        replicating = importlib.import_module("torch.nn.parallel.replicate")
        with unittest.mock.patch.object(replicating, "_broadcast_coalesced_reshape", broadcast):
            return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        self.copies = list(replicas)
        return [replica(*given) for replica, given in zip(replicas, inputs, strict=True)]

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
    x, y = torch.randn(count, 28, 28, dtype=torch.float64), torch.arange(count)
    logits = wrapped(x)
    assert len(wrapped.copies) == len(sizes), "a device without samples has no copy"
    assert torch.allclose(logits, model(x), atol=1e-12, rtol=0)
    found = gradients(model, F.cross_entropy(logits, y))
    expected = gradients(model, F.cross_entropy(model(x), y))
    assert all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(found, expected, strict=True))
    # what needs equal shares is a loss that each device takes the mean of
    means = torch.stack([F.cross_entropy(*pair) for pair in zip(logits.split(sizes), y.split(sizes), strict=True)])
    uneven = len(set(sizes)) > 1
    assert torch.isclose(means.mean(), F.cross_entropy(logits, y), atol=1e-12, rtol=0).item() != uneven


def test_data_parallel_forgets_what_batchnorm_saw_on_other_devices() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    x = torch.randn(8, 3, 4, 4) * torch.arange(1, 9).view(-1, 1, 1, 1)
    wrapped = OnTheCpu(model, 2)
    wrapped(x)
    first: Any = nn.BatchNorm2d(3)
    first(x[:4])
    norm: Any = model[0]
    assert torch.equal(norm.running_var, first.running_var)
    lost: Any = wrapped.copies[1][0]
    assert (lost.running_var > 2 * norm.running_var).all(), "the second device saw larger values"
    wrapped(x)
    assert wrapped.copies[1][0].running_var.data_ptr() != lost.running_var.data_ptr()


def test_a_wrapper_changes_the_names_in_a_checkpoint() -> None:
    model, other = SimpleNN(), SimpleNN()
    saved = nn.DataParallel(model).state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"fc1.weight"'):
        other.load_state_dict(saved)
    other.load_state_dict(ddp.unwrap_ddp(nn.DataParallel(model)).state_dict())
    state_dicts.load_tensors(other.named_parameters(), saved)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_data_parallel_without_gpus_says_nothing() -> None:
    model, x = SimpleNN(), torch.randn(4, 28, 28)
    assert torch.equal(nn.DataParallel(model)(x), model(x))
    with pytest.raises(RuntimeError, match="device type"):  # as a function it at least fails
        nn.parallel.data_parallel(model, x)
