"""Which weights are zero: choosing exactly as many as asked, and masks that keep them so.

A mask is true where a weight lives. Scores are never negative; what is pruned already has the score -1, so that it is
chosen first and stays pruned. All functions take one tensor a layer, [out, in, ...].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

SAMPLE = 1 << 16  # numbers that tell roughly where a rank lies among many more
GONE = -1.0  # the score of a weight that is pruned already


# ---- exactly so many


def kth(values: Tensor, k: int) -> Tensor:
    """The k-th smallest of values [n], 1 <= k <= n, exactly.

    Of many, a sample tells between which two it must lie: then one look at all counts those below, and only the few
    between are sorted. Where the sample misleads, all are.
    """
    if values.numel() <= 16 * SAMPLE:
        return values.kthvalue(k).values
    sample = values[:: values.numel() // SAMPLE].sort().values
    middle, margin = k * len(sample) // values.numel(), 4 * math.isqrt(len(sample))
    low, high = sample[max(0, middle - margin)], sample[min(len(sample) - 1, middle + margin)]
    below = int((values < low).sum())
    between = values[(values >= low) & (values <= high)]
    if below < k <= below + len(between):
        return between.kthvalue(k - below).values
    return values.kthvalue(k).values


def lowest(scores: Tensor, count: int) -> Tensor:
    """True for exactly `count` of the lowest scores, of any shape; among equal ones the earlier are taken."""
    if count <= 0 or count >= scores.numel():
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    flat = scores.flatten()
    limit = kth(flat, count)
    chosen = flat <= limit
    surplus = int(chosen.sum()) - count
    if surplus:
        chosen[(flat == limit).nonzero().flatten()[-surplus:]] = False
    return chosen.view(scores.shape)


def globally(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Masks without the lowest scores of all layers together."""
    flat = torch.cat([score.flatten() for score in scores])
    kept = lowest(flat, round(sparsity * flat.numel())).logical_not_()
    parts = kept.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


def by_layer(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Masks without the lowest scores of each layer."""
    return [~lowest(score, round(sparsity * score.numel())) for score in scores]


def by_channel(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Masks without the least channels or units of each layer, by the length of their scores; the last layer, whose
    units are the classes, stays whole, and of every layer at least one channel."""
    masks = []
    for score in scores[:-1]:
        worth = score.flatten(1).clamp(min=0).norm(dim=1)
        gone = lowest(worth, min(round(sparsity * len(worth)), len(worth) - 1))
        masks.append((~gone).view(-1, *[1] * (score.dim() - 1)).expand_as(score))
    return [*masks, torch.ones_like(scores[-1], dtype=torch.bool)]


def by_group(scores: Sequence[Tensor], sparsity: float, size: int) -> list[Tensor]:
    """Masks without the lowest of each `size` scores in a row of [out, rest]: as many as fit into the sparsity.

    What is left of a row that is no multiple of `size` stays.
    """
    gone, masks = math.floor(sparsity * size + 1e-6), []
    for score in scores:
        mask = torch.ones_like(score, dtype=torch.bool)
        rows, end = mask.view(len(score), -1), score[0].numel() // size * size
        order = score.flatten(1)[:, :end].reshape(len(score), -1, size).argsort(dim=2, stable=True)
        groups = torch.ones_like(order, dtype=torch.bool).scatter_(2, order[..., :gone], False)
        rows[:, :end] = groups.flatten(1)
        masks.append(mask)
    return masks


def erdos_renyi(shapes: Sequence[torch.Size], sparsity: float) -> list[float]:
    """The sparsity of each layer in RigL's distribution ERK: its density goes as the sum of its sides over their
    product, so that small layers stay denser; a layer that would be more than dense is dense."""
    budget = (1 - sparsity) * sum(shape.numel() for shape in shapes)
    dense: set[int] = set()
    while True:
        rest = [i for i in range(len(shapes)) if i not in dense]
        left = budget - sum(shapes[i].numel() for i in dense)
        factor = left / max(1, sum(sum(shapes[i]) for i in rest))
        full = {i for i in rest if factor * sum(shapes[i]) >= shapes[i].numel()}
        if not full:
            return [0.0 if i in dense else 1 - factor * sum(s) / s.numel() for i, s in enumerate(shapes)]
        dense |= full


# ---- masks of a model


class Masks:
    """The masks of a model's linear and convolutional weights; biases and norms are never pruned.

    They are buffers of the layers, `weight_mask`, bool: so they travel into checkpoints and back with the model. To
    multiply with them they are kept as numbers, too, which takes a tenth of the time; `refresh` makes these anew.
    """

    def __init__(self, model: nn.Module) -> None:
        named = model.named_modules()
        self.layers = {name: layer for name, layer in named if isinstance(layer, nn.Linear | nn.Conv2d)}
        for layer in self.layers.values():
            layer.register_buffer("weight_mask", torch.ones_like(layer.weight, dtype=torch.bool))
        self.weights = [layer.weight for layer in self.layers.values()]
        self.total = sum(weight.numel() for weight in self.weights)
        self.refresh()

    @property
    def kept(self) -> list[Tensor]:
        return [layer.get_buffer("weight_mask") for layer in self.layers.values()]

    @torch.no_grad()
    def set(self, masks: Sequence[Tensor]) -> None:
        for own, mask in zip(self.kept, masks, strict=True):
            own.copy_(mask)
        self.refresh()

    def refresh(self) -> None:
        """After the buffers were changed, as by a checkpoint."""
        self.factors = [mask.to(weight.dtype) for mask, weight in zip(self.kept, self.weights, strict=True)]
        self.sparsity = 1 - sum(int(mask.sum()) for mask in self.kept) / self.total

    @torch.no_grad()
    def apply(self) -> None:
        """Make pruned weights exactly zero."""
        torch._foreach_mul_(self.weights, self.factors)

    @torch.no_grad()
    def apply_to_memory(self, optimizer: Optimizer) -> None:
        """Let the optimizer forget pruned weights: one that comes back starts without momentum."""
        for weight, factor in zip(self.weights, self.factors, strict=True):
            for value in optimizer.state[weight].values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    value.mul_(factor)

    def digest(self) -> str:
        """A hash of all masks, the same for the same masks on whatever device."""
        found = hashlib.sha256()
        for name, mask in zip(self.layers, self.kept, strict=True):
            found.update(name.encode() + np.packbits(mask.cpu().numpy()).tobytes())
        return found.hexdigest()

    def agree(self) -> str:
        """The hash, if all processes have the same. All processes call it. Raises RuntimeError where they differ."""
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, self.digest())
        others = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if others:
            raise RuntimeError(
                f"the masks of ranks {others} differ from rank 0's: they were computed from other weights or gradients"
            )
        return found[0]


def nonzero(weights: Sequence[Tensor]) -> int:
    """Weights that are not zero, whatever made the others so."""
    return sum(int(weight.count_nonzero()) for weight in weights)
