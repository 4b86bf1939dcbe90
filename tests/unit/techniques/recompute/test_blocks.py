"""Recomputed blocks have the same gradients and buffers to the bit, and keep less. Copies use their own parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.models.gpt import GPT
from common.models.networks import ResNet
from common.models.sample_dropout import list_dropout_layers
from common.system.errors import UserError
from common.techniques.recompute import recompute_blocks
from common.techniques.recompute.blocks import list_blocks
from common.training.saved_tensors import SavedTensors
from configs.memory import NETWORKS_WITHOUT_BLOCKS
from tests.harness.commands.refusals import expect_refusal

VOCABULARY = 40
MODES = ("blocks", "selective")
MICROBATCH_SIZE = 3


def build_gpt() -> nn.Module:
    return GPT(8, VOCABULARY, width=16, layers=2, heads=2, key_value_heads=1, dropout=0.3, seed=5)


def build_resnet() -> nn.Module:
    return ResNet("resnet18", (3, 16, 16), 10, width=4)


def make_dropout_branch() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 16))


def build_sequential() -> nn.Module:
    """Return a network whose masks come from torch's random stream."""
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), make_dropout_branch(), make_dropout_branch())


class Residual(nn.Module):
    """A network with an attribute `blocks`, which passes further arguments to its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = x + block(x, scale=0.5)
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return self.dropout(self.layer(x).tanh()) * scale


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gpt": (build_gpt, (8,)),
    "resnet": (build_resnet, (3, 16, 16)),
    "sequential": (build_sequential, (3, 4, 4)),
    "attribute": (Residual, (1, 4, 4)),
}
"""Each network with the shape of an input."""


def draw_inputs(name: str) -> Tensor:
    """Return the inputs of two microbatches."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, MICROBATCH_SIZE, *NETWORKS[name][1])
    if name == "gpt":
        return torch.randint(VOCABULARY, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def train_step(name: str, recompute: str) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Compute two microbatches, and then their backward passes, as the first stage of a pipeline does.

    Returns both losses, all gradients and buffers by name, and the bytes that autograd has saved.
    """
    torch.manual_seed(0)
    network = NETWORKS[name][0]().double()
    recompute_blocks(network, recompute)
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    positions = [range(MICROBATCH_SIZE), range(MICROBATCH_SIZE, 2 * MICROBATCH_SIZE)]
    for layer in list_dropout_layers([network]):
        layer.set_positions(0, positions)
    with saved_tensors_hooks(record, lambda tensor: tensor):
        losses = [network(x).square().mean() for x in draw_inputs(name)]
    for loss in losses:
        loss.backward()
    tensors: dict[str, Any] = {name: parameter.grad for name, parameter in network.named_parameters()}
    tensors |= network.named_buffers()
    return losses, tensors, sum(sizes.values())


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_buffers_do_not_change(name: str, recompute: str) -> None:
    expected_losses, expected, expected_bytes = train_step(name, "none")
    losses, tensors, saved_bytes = train_step(name, recompute)
    assert losses == expected_losses
    assert tensors.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        assert torch.equal(tensors[tensor_name], tensor), tensor_name
    assert saved_bytes < 0.7 * expected_bytes


def test_copies_of_buffers_count_as_activations() -> None:
    """Each forward pass in training mode copies the buffers of each block."""
    features = 1000
    network = nn.Sequential(nn.Sequential(nn.Linear(2, features), nn.BatchNorm1d(features)))
    recompute_blocks(network, "blocks")
    copied_bytes = sum(buffer.nbytes for buffer in network.buffers())
    x = torch.randn(3, 2)
    with SavedTensors([network]) as saved:
        losses = [network(x).sum() for _ in range(2)]
        assert saved.peak_bytes == 2 * copied_bytes + x.nbytes
        while losses:
            losses.pop().backward()
        network(x)
    assert saved.peak_bytes == 2 * copied_bytes + x.nbytes, "backward passes release the copies"


def test_a_copy_uses_its_own_parameters() -> None:
    network = build_sequential().double()
    recompute_blocks(network, "blocks")
    twin = copy.deepcopy(network)
    inputs = draw_inputs("sequential")[0]
    twin(inputs).sum().backward()
    for parameter, copied_parameter in zip(network.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is None
        assert copied_parameter.grad is not None


def test_blocks_are_residual_blocks_or_children_with_layers() -> None:
    resnet: Any = build_resnet()
    blocks = list_blocks(resnet)
    names = [name for name, layer in resnet.named_children() if layer in blocks]
    assert " ".join(names) == "layer1_0 layer1_1 layer2_0 layer2_1 layer3_0 layer3_1 layer4_0 layer4_1"
    gpt: Any = build_gpt()
    assert list_blocks(gpt) == [gpt.block0, gpt.block1]
    sequential: Any = build_sequential()
    assert list_blocks(sequential) == [sequential[2], sequential[3]]
    assert len(list_blocks(Residual())) == 2
    network = nn.Module()
    network.blocks = sequential
    assert list_blocks(network) == list(sequential)


WITHOUT_BLOCKS = {"leaves": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "module": Scaled(), "empty": nn.Sequential()}


@pytest.mark.parametrize("name", WITHOUT_BLOCKS)
def test_a_network_without_blocks_is_refused(name: str) -> None:
    network = WITHOUT_BLOCKS[name]
    kind = type(network).__name__
    with expect_refusal(f"recompute=blocks: the network {kind} has no blocks; omit recompute, add an attribute"):
        recompute_blocks(network, "blocks")
    recompute_blocks(network, "none")


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x), inplace=True)


def test_a_block_that_changes_a_kept_result_in_place_is_refused() -> None:
    x = torch.randn(2, 3, 8, 8)
    network = nn.Sequential(InPlace(), InPlace())
    recompute_blocks(network, "selective")
    loss = network(x).sum()
    with pytest.raises(UserError, match=r"inplace=True\); remove inplace=True, or use recompute=blocks"):
        loss.backward()
    network = nn.Sequential(InPlace(), InPlace())
    recompute_blocks(network, "blocks")
    network(x).sum().backward()


def test_the_networks_without_blocks_are_those_that_the_settings_refuse() -> None:
    from common.models.networks import ConvNet, SimpleNN, Toy

    networks = {"mlp": SimpleNN(), "convnet": ConvNet((8, 8), 10), "toy": Toy((10,), 5)}
    assert tuple(networks) == NETWORKS_WITHOUT_BLOCKS
    for network in networks.values():
        assert list_blocks(network) == []
