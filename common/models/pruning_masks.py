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
PRUNED_SCORE = -1.0  # the score of a weight that is pruned already


# ---- exactly so many


def count_nonzero(chosen: Tensor) -> int:
    """How many are true, or not zero: a twentieth of the time of `sum`, which makes them numbers first."""
    return int(chosen.count_nonzero())


def find_kth_smallest(parts: Sequence[Tensor], k: int) -> Tensor:
    """The k-th smallest of all n values in the parts, 1 <= k <= n, exactly.

    Of many, a sample tells between which two it must lie: then one look at all counts those below, and only the few
    between are sorted. Where the sample misleads, all are.
    """
    flat, total = [part.flatten() for part in parts], sum(part.numel() for part in parts)
    if total <= 16 * SAMPLE:
        return torch.cat(flat).kthvalue(k).values
    sample = torch.cat([part[:: total // SAMPLE] for part in flat]).sort().values
    middle, margin = k * len(sample) // total, 2 * math.isqrt(len(sample))  # four deviations
    low, high = sample[max(0, middle - margin)], sample[min(len(sample) - 1, middle + margin)]
    below, near = 0, []
    for part in flat:
        above = part >= low
        below += part.numel() - count_nonzero(above)
        near.append(part[above.logical_and_(part <= high)])
    between = torch.cat(near)
    if below < k <= below + len(between):
        return between.kthvalue(k - below).values
    return torch.cat(flat).kthvalue(k).values


def select_lowest(parts: Sequence[Tensor], number: int) -> list[Tensor]:
    """True for exactly `number` of the lowest scores in all parts; among equal ones the earlier are taken."""
    if number <= 0:
        return [torch.zeros_like(part, dtype=torch.bool) for part in parts]
    limit = find_kth_smallest(parts, min(number, sum(part.numel() for part in parts)))
    chosen = [part <= limit for part in parts]
    surplus = sum(map(count_nonzero, chosen)) - number
    for part, mask in zip(reversed(parts), reversed(chosen), strict=True):
        if surplus > 0:
            ties = (part.flatten() == limit).nonzero().flatten()[-surplus:]
            mask.view(-1)[ties] = False
            surplus -= len(ties)
    return chosen


def prune_globally(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Masks without the lowest scores of all layers together."""
    gone = select_lowest(scores, round(sparsity * sum(score.numel() for score in scores)))
    return [mask.logical_not_() for mask in gone]


def prune_layers(scores: Sequence[Tensor], sparsity: Sequence[float]) -> list[Tensor]:
    """Masks without the lowest scores of each layer, at its own sparsity; exactly as many as all together make."""
    wanted = [share * score.numel() for score, share in zip(scores, sparsity, strict=True)]
    counts = [math.floor(number) for number in wanted]
    by_rest = sorted(range(len(counts)), key=lambda i: counts[i] - wanted[i])  # those that lost most by the floor
    for i in by_rest[: round(sum(wanted)) - sum(counts)]:
        counts[i] += 1
    return [~select_lowest([score], number)[0] for score, number in zip(scores, counts, strict=True)]


def prune_channels(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Masks without the least channels or units of each layer, by the length of their scores; the last layer, whose
    units are the classes, stays whole, and of every layer at least one channel."""
    masks = []
    for score in scores[:-1]:
        rows = score.flatten(1)
        worth = rows.clamp(min=0).norm(dim=1).masked_fill((rows < 0).all(1), PRUNED_SCORE)
        gone = select_lowest([worth], min(round(sparsity * len(worth)), len(worth) - 1))[0]
        masks.append((~gone).view(-1, *[1] * (score.dim() - 1)).expand_as(score))
    return [*masks, torch.ones_like(scores[-1], dtype=torch.bool)]


def prune_groups(scores: Sequence[Tensor], sparsity: float, size: int) -> list[Tensor]:
    """Masks without the lowest of each `size` scores in a row of [out, rest]: as many as fit into the sparsity.

    What is left of a row that is no multiple of `size` stays.
    """
    gone, masks = math.floor(sparsity * size + 1e-3), []  # thirds are written with few digits
    for score in scores:
        mask = torch.ones_like(score, dtype=torch.bool)
        rows, end = mask.view(len(score), -1), score[0].numel() // size * size
        order = score.flatten(1)[:, :end].reshape(len(score), -1, size).argsort(dim=2, stable=True)
        groups = torch.ones_like(order, dtype=torch.bool).scatter_(2, order[..., :gone], False)
        rows[:, :end] = groups.flatten(1)
        masks.append(mask)
    return masks


def allocate_erdos_renyi(shapes: Sequence[torch.Size], sparsity: float) -> list[float]:
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
        self.factors = [torch.empty_like(weight, requires_grad=False) for weight in self.weights]
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
        for factor, mask in zip(self.factors, self.kept, strict=True):
            factor.copy_(mask)
        self.sparsity = 1 - sum(map(count_nonzero, self.kept)) / self.total

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
