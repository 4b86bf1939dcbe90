"""Dropout whose masks depend on a sample's position in the epoch, not on its rank or batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from common.core import seeds


class SampleDropout(nn.Module):
    """Dropout (Hinton et al. 2012, arXiv 1207.0580) that draws a sample's mask from its position in the epoch.

    However a batch is divided into shards and microbatches, each sample gets the mask that a single process would draw.
    torch's dropout draws from a generator of the process, in the order in which the process computes samples.
    """

    def __init__(self, rate: float, seed: int, name: str = "dropout") -> None:
        """`rate` is the fraction of inputs set to zero.

        The others are divided by 1 - rate.

        Layers with different names draw different masks.
        """
        super().__init__()
        self.rate = rate
        self.seed = seed
        self.name = name
        self.epoch = 0
        self.microbatches: deque[range] = deque()
        """Positions of the samples of each remaining microbatch of the step."""

    def begin_step(self, epoch: int, microbatches: Iterable[range]) -> None:
        """Set the positions in the epoch, from 0, of the samples of the next calls, one call per microbatch."""
        self.epoch = epoch
        self.microbatches = deque(microbatches)

    def forward(self, input: Tensor) -> Tensor:
        """Drop inputs [n, ...] of the next microbatch in training mode.

        Outside of steps, the masks are those of the first n samples.

        Raises ValueError if the microbatch has a different number of samples.
        """
        if not self.training:
            return input
        positions = self.microbatches.popleft() if self.microbatches else range(len(input))
        if len(positions) != len(input):
            raise ValueError(
                f"dropout got {len(input)} samples for a microbatch of {len(positions)}; call the model once for each "
                "microbatch of the step, with all of its samples"
            )
        size = input[0].numel() if len(input) else 0
        mask = self.draw_mask(positions, size).to(input.device).view_as(input)
        return input * mask / (1 - self.rate)

    def draw_mask(self, positions: range, size: int) -> Tensor:
        """Draw the mask, bool [n, size], of samples at consecutive positions.

        It is true where an input is kept.
        """
        earlier_draws = positions.start * size  # one per input of the preceding samples
        generator = seeds.make_generator(self.seed, self.name, self.epoch, skip=earlier_draws)
        draws = generator.random((len(positions), size))
        return torch.from_numpy(draws >= self.rate)

    def extra_repr(self) -> str:
        """Return the rate, for the model's printed form."""
        return f"rate={self.rate}"


def add_dropout(network: nn.Sequential, rate: float, seed: int) -> nn.Sequential:
    """Insert dropout before the last layer of a network and return the network.

    A rate of 0 changes nothing.

    Parameters keep their names.
    """
    if rate:
        name, last_layer = list(network.named_children())[-1]
        delattr(network, name)
        network.add_module("dropout", SampleDropout(rate, seed))
        network.add_module(name, last_layer)
    return network


def exclude_from_compiling(network: nn.Module) -> None:
    """Exclude dropout layers from torch.compile: NumPy draws their masks."""
    for layer in list_dropout_layers([network]):
        layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]


def list_dropout_layers(parts: Sequence[nn.Module]) -> list[SampleDropout]:
    """Return the dropout layers of a model's parts."""
    layers: list[SampleDropout] = []
    for part in parts:
        layers += [layer for layer in part.modules() if isinstance(layer, SampleDropout)]
    return layers
