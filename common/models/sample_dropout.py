"""Dropout whose masks belong to the samples of an epoch, not to the rank or the batch in which one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from common.core import seeds


class SampleDropout(nn.Module):
    """Dropout (Hinton et al. 2012, arXiv 1207.0580) that draws a sample's mask from its position in the epoch.

    However a batch is cut into shards and microbatches, each sample has the mask that one process would draw for it.
    torch's own dropout draws from a stream of the process, for the samples in the order in which this computes them.
    """

    def __init__(self, rate: float, seed: int, name: str = "dropout") -> None:
        """`rate` is the share of inputs set to zero; the others are divided by 1 - rate.

        Layers of other names draw other masks.
        """
        super().__init__()
        self.rate, self.seed, self.name, self.epoch = rate, seed, name, 0
        self.waiting: deque[range] = deque()
        """Positions of the samples of each microbatch of the step that is still to come."""

    def begin_step(self, epoch: int, microbatches: Iterable[range]) -> None:
        """Name the positions in the epoch, from 0, of the samples of the next calls, one call a microbatch."""
        self.epoch, self.waiting = epoch, deque(microbatches)

    def forward(self, input: Tensor) -> Tensor:
        """Drop inputs [n, ...] while training, of the next microbatch; outside of steps, of the first n samples.

        Raises ValueError where the microbatch has another number of samples.
        """
        if not self.training:
            return input
        positions = self.waiting.popleft() if self.waiting else range(len(input))
        if len(positions) != len(input):
            raise ValueError(
                f"dropout of {len(input)} samples, and the microbatch has {len(positions)}; call the model once "
                "for each microbatch of the step, with all of its samples"
            )
        kept = self.draw_mask(positions, input[0].numel() if len(input) else 0)
        return input * kept.to(input.device).view_as(input) / (1 - self.rate)

    def draw_mask(self, positions: range, size: int) -> Tensor:
        """Draw which inputs are kept, bool [n, size], of the samples at consecutive positions."""
        before = positions.start * size  # numbers of the samples before, one draw each
        stream = seeds.make_generator(self.seed, self.name, self.epoch, skip=before)
        return torch.from_numpy(stream.random((len(positions), size)) >= self.rate)

    def extra_repr(self) -> str:
        """Return the rate, for the model's printed form."""
        return f"rate={self.rate}"


def add_dropout(network: nn.Sequential, rate: float, seed: int) -> nn.Sequential:
    """Let a network drop inputs of its last layer while training; return it, unchanged where the rate is 0.

    Parameters keep their names.
    """
    if rate:
        name, last = list(network.named_children())[-1]
        delattr(network, name)
        network.add_module("dropout", SampleDropout(rate, seed))
        network.add_module(name, last)
    return network


def exclude_from_compiling(network: nn.Module) -> None:
    """Let torch.compile leave dropout layers as they are: their masks are drawn by NumPy."""
    for layer in list_dropout([network]):
        layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]


def list_dropout(parts: Sequence[nn.Module]) -> list[SampleDropout]:
    """Return the dropout layers of a model's parts."""
    return [layer for part in parts for layer in part.modules() if isinstance(layer, SampleDropout)]
