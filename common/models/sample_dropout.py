"""Dropout that gives a sample the same mask on any rank and in any batch.

The mask depends on the seed, the name of the layer, the epoch, and the position of the sample in the epoch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from common.system import seeds
from common.system.errors import UserError
from configs.fields import find_group
from configs.shared import Regularization

N = TypeVar("N", bound=nn.Module)


class SampleDropout(nn.Module):
    """A dropout layer whose masks depend on the positions of the samples in the epoch.

    Dropout was introduced by Hinton et al. 2012, arXiv 1207.0580. Each sample gets the mask that a single process would
    draw, regardless of how a batch is divided into shards and microbatches. The masks of `torch.nn.Dropout` depend on
    the order in which a process computes samples, because all masks are drawn from one generator.
    """

    def __init__(self, rate: float, seed: int, name: str = "dropout") -> None:
        """Create a layer that sets a random fraction `rate` of its inputs to zero.

        The remaining inputs are divided by 1 - rate. Layers with different names draw different masks.
        """
        super().__init__()
        self.rate = rate
        self.seed = seed
        self.name = name
        self.epoch = 0
        self.microbatches: deque[range] = deque()
        """Positions of the samples of each remaining microbatch in the current step."""
        self.step_microbatches: list[range] = []
        """Positions of the samples of each microbatch that the loader yields in the current step."""

    def set_positions(self, epoch: int, microbatches: Iterable[range]) -> None:
        """Set the epoch and the sample positions of each microbatch of the next step.

        Positions are counted from 0 within the epoch. Each subsequent call of the layer processes one microbatch.
        """
        self.epoch = epoch
        self.step_microbatches = list(microbatches)
        self.microbatches = deque(self.step_microbatches)

    def select_share(self, share: int, shares: int) -> None:
        """Let the next call process one of several equal shares of the step's batch, in any order of the shares.

        The loader must yield the batch as one microbatch, or each share as a microbatch. Without positions, this method
        has no effect.
        """
        if len(self.step_microbatches) == 1:
            (positions,) = self.step_microbatches
            size = len(positions) // shares
            self.microbatches = deque([positions[share * size : (share + 1) * size]])
        elif self.step_microbatches:
            self.microbatches = deque([self.step_microbatches[share]])

    def copy_positions(self) -> list[range]:
        """Return the positions of the samples that the next calls process."""
        return list(self.microbatches)

    @contextlib.contextmanager
    def use_positions(self, microbatches: Iterable[range]) -> Iterator[None]:
        """Let the calls in the `with` block process these positions. Later calls process the positions from before."""
        next_microbatches = self.microbatches
        self.microbatches = deque(microbatches)
        try:
            yield
        finally:
            self.microbatches = next_microbatches

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout to the inputs [n, ...] of the next microbatch.

        In eval mode, the inputs are returned unchanged. If no microbatch remains, the masks of the first n samples of
        the epoch are used. Raises ValueError if the next microbatch does not have n samples.
        """
        if not self.training:
            return input
        positions = self.pop_positions(len(input))
        size = input[0].numel() if len(input) else 0
        mask = self.draw_mask(positions, size).to(input.device).view_as(input)
        return input * mask / (1 - self.rate)

    def pop_positions(self, count: int) -> range:
        """Return the positions of the `count` samples of the next microbatch.

        Raises ValueError if the next microbatch has another number of samples.
        """
        positions = self.microbatches.popleft() if self.microbatches else range(count)
        if len(positions) != count:
            raise ValueError(
                f"dropout got {count} samples for a microbatch of {len(positions)} samples; call the model once "
                "for each microbatch of the step, with all samples of the microbatch"
            )
        return positions

    def draw_mask(self, positions: range, size: int) -> Tensor:
        """Draw the masks of n samples at consecutive positions.

        The result is a bool tensor [n, size], where `size` is the number of inputs per sample. The mask is True for
        each input that dropout does not set to zero.
        """
        # The random numbers of all samples of an epoch are one sequence, with `size` numbers per sample.
        earlier_draws = positions.start * size
        generator = seeds.make_generator(self.seed, self.name, self.epoch, skip=earlier_draws)
        draws = generator.random((len(positions), size))
        return torch.from_numpy(draws >= self.rate)

    def extra_repr(self) -> str:
        """Return the rate for the printed representation of the model."""
        return f"rate={self.rate}"


def get_dropout(cfg: object) -> float:
    """Return the dropout probability of a config, or 0 if the config has no such setting."""
    settings = find_group(cfg, Regularization)
    return settings.dropout if settings else 0.0


def add_dropout(network: N, rate: float, seed: int) -> N:
    """Insert a dropout layer before the last layer of a network, and return the network.

    The names of all parameters stay the same. If `rate` is 0, the network is returned unchanged. Raises UserError if
    the network is not an nn.Sequential.
    """
    if rate:
        if not isinstance(network, nn.Sequential):
            problem = f"dropout={rate:g} needs a network that is an nn.Sequential"
            raise UserError(f"{problem}; omit dropout, and add dropout layers in the custom network")
        # Children of nn.Sequential run in the order in which they were added. A layer can have several names.
        *_, (name, last_layer) = network._modules.items()
        delattr(network, name)
        network.add_module("dropout", SampleDropout(rate, seed))
        network.add_module(name, last_layer)
    return network


def exclude_dropout_from_compiling(network: nn.Module) -> None:
    """Exclude dropout layers from torch.compile, because NumPy draws their masks."""
    for layer in list_dropout_layers([network]):
        layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]


def list_dropout_layers(parts: Sequence[nn.Module]) -> list[SampleDropout]:
    """Return all SampleDropout layers in the parts of a model."""
    layers: list[SampleDropout] = []
    for part in parts:
        layers += [layer for layer in part.modules() if isinstance(layer, SampleDropout)]
    return layers
