"""Mistakes with the recomputation of activations: what they do, and what is correct."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.techniques.recompute import recompute_blocks


def make_network(layer: nn.Module) -> nn.Sequential:
    """Return a network with one block, which contains the layer."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 32), layer, nn.ReLU(), nn.Linear(32, 8))
    return nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 4)).double()


def compute_gradient(network: Any, *, checkpointed: bool = False, **options: Any) -> tuple[float, Tensor]:
    """Return the loss and the gradient of all parameters. Each call draws the same random numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (16,), generator=generator)
    torch.manual_seed(2)
    first, block, last = network
    hidden = first(x)
    hidden = checkpoint(block, hidden, use_reentrant=False, **options) if checkpointed else block(hidden)
    loss = F.cross_entropy(last(hidden), targets)
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in network.parameters()]
    return loss.item(), torch.cat(gradients)


def test_without_the_random_state_a_recomputation_draws_other_masks() -> None:
    """The loss is the same, so nothing shows that the gradient is wrong."""
    network = make_network(nn.Dropout(0.2))
    loss, gradient = compute_gradient(copy.deepcopy(network))
    other_loss, wrong_gradient = compute_gradient(copy.deepcopy(network), checkpointed=True, preserve_rng_state=False)
    assert other_loss == loss
    assert (wrong_gradient - gradient).norm() > 0.05 * gradient.norm()

    same_loss, same_gradient = compute_gradient(copy.deepcopy(network), checkpointed=True)
    assert same_loss == loss
    assert torch.equal(same_gradient, gradient), "by default, the random state is restored"
    recompute_blocks(network, "blocks")
    _, recomputed_gradient = compute_gradient(network)
    assert torch.equal(recomputed_gradient, gradient)


def test_a_recomputation_updates_the_statistics_of_batchnorm_twice() -> None:
    """The gradients are correct, but an evaluation uses other statistics."""
    network = make_network(nn.BatchNorm1d(32))
    networks = {name: copy.deepcopy(network) for name in ("plain", "checkpointed", "recomputed")}
    recompute_blocks(networks["recomputed"], "blocks")
    gradients = {}
    for name, changed_network in networks.items():
        gradients[name] = compute_gradient(changed_network, checkpointed=name == "checkpointed")[1]
    norms: list[Any] = [changed_network.get_submodule("1.1") for changed_network in networks.values()]

    plain, twice, recomputed = norms
    assert torch.equal(gradients["checkpointed"], gradients["plain"])
    assert plain.num_batches_tracked == 1
    assert twice.num_batches_tracked == 2
    batch_mean = plain.running_mean / plain.momentum
    weight_of_two_updates = 1 - (1 - plain.momentum) ** 2
    torch.testing.assert_close(twice.running_mean, batch_mean * weight_of_two_updates)

    assert torch.equal(gradients["recomputed"], gradients["plain"])
    for name, buffer in plain.named_buffers():
        assert torch.equal(recomputed.get_buffer(name), buffer), name
