"""Pruning masks: selecting exactly as many weights as asked by their scores, and keeping pruned weights at zero.

A mask is bool, true where a weight is kept. Scores are not negative, such as a weight's magnitude (Han et al. 2015,
arXiv 1506.02626) or its first-order Taylor importance (Molchanov et al. 2019, arXiv 1906.10771); a weight that is
pruned already has PRUNED_SCORE, so that it is selected first and stays pruned. Scores and masks are lists with one
tensor a layer, of the shape of its weight: [out, in] or [out, in, kernel, kernel].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from common.distributed import objects

SAMPLE = 1 << 16  # values that bound where the k-th smallest of many more lies
PRUNED_SCORE = -1.0  # the score of a weight that is pruned already
MASK = "weight_mask"  # the buffer of a layer that holds its mask


# ---- selection of exactly k weights


def count_nonzero(chosen: Tensor) -> int:
    """Return the number of elements that are true or not zero; 20 times as fast as `sum` of a bool tensor."""
    return int(chosen.count_nonzero())


def find_kth_smallest(parts: Sequence[Tensor], k: int) -> Tensor:
    """Return the k-th smallest of all n values in the parts (any shapes), 1 <= k <= n, exactly, as a 0-d tensor.

    For many values, a sorted sample gives two bounds; one pass counts the values below them, and only those between
    are sorted. If the bounds fail, all values are sorted.
    """
    flat, total = [part.flatten() for part in parts], sum(part.numel() for part in parts)
    if total <= 16 * SAMPLE:
        return torch.cat(flat).kthvalue(k).values
    sample = torch.cat([part[:: total // SAMPLE] for part in flat]).sort().values
    middle, margin = k * len(sample) // total, 2 * math.isqrt(len(sample))  # four standard deviations
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
    """Return bool tensors, true for exactly the `number` lowest scores of all parts; of equal ones, the first."""
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


def make_global_masks(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Return masks that drop the fraction `sparsity` with the lowest scores of all layers together."""
    dropped = select_lowest(scores, round(sparsity * sum(score.numel() for score in scores)))
    return [mask.logical_not_() for mask in dropped]


def make_layer_masks(scores: Sequence[Tensor], sparsity: Sequence[float]) -> list[Tensor]:
    """Return masks that drop each layer's lowest scores at its own sparsity; the total is rounded only once."""
    wanted = [fraction * score.numel() for score, fraction in zip(scores, sparsity, strict=True)]
    counts = [math.floor(number) for number in wanted]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - wanted[i])
    for i in by_remainder[: round(sum(wanted)) - sum(counts)]:
        counts[i] += 1
    return [~select_lowest([score], number)[0] for score, number in zip(scores, counts, strict=True)]


def make_channel_masks(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Return masks that drop whole output channels (or units) of each layer, those with the lowest L2 norm of scores.

    The last layer, whose units are the classes, is not pruned, and each layer keeps at least one channel.
    """
    masks = []
    for score in scores[:-1]:
        rows = score.flatten(1)
        norms = rows.clamp(min=0).norm(dim=1).masked_fill((rows < 0).all(1), PRUNED_SCORE)
        dropped = select_lowest([norms], min(round(sparsity * len(norms)), len(norms) - 1))[0]
        masks.append((~dropped).view(-1, *[1] * (score.dim() - 1)).expand_as(score))
    return [*masks, torch.ones_like(scores[-1], dtype=torch.bool)]


def make_group_masks(scores: Sequence[Tensor], sparsity: float, size: int) -> list[Tensor]:
    """Return N:M masks: each group of `size` neighbours in a row of [out, rest] loses its lowest scores.

    2:4 is `size` = 4 at a sparsity of 0.5 (Mishra et al. 2021, arXiv 2104.08378). Each group loses as many as fit into
    the sparsity; the end of a row that fills no group is kept.
    """
    dropped, masks = math.floor(sparsity * size + 1e-3), []  # 1e-3: thirds are written with few digits
    for score in scores:
        mask = torch.ones_like(score, dtype=torch.bool)
        rows, end = mask.view(len(score), -1), score[0].numel() // size * size
        order = score.flatten(1)[:, :end].reshape(len(score), -1, size).argsort(dim=2, stable=True)
        groups = torch.ones_like(order, dtype=torch.bool).scatter_(2, order[..., :dropped], False)
        rows[:, :end] = groups.flatten(1)
        masks.append(mask)
    return masks


def allocate_erdos_renyi(shapes: Sequence[torch.Size], sparsity: float) -> list[float]:
    """Return the sparsity of each layer under the Erdos-Renyi-Kernel distribution (Evci et al. 2019, arXiv 1911.11134).

    A layer's density is proportional to the sum of its dimensions over their product, so that small layers stay
    denser; a layer whose density would exceed 1 is dense. `shapes` are those of the weights, `sparsity` the overall
    fraction of zeros.
    """
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

    They are bool buffers of the layers, `weight_mask`, and so part of checkpoints. `factors` holds them as numbers of
    the weights' type, too: multiplying by those takes a tenth of the time. Call `recompute_factors` after changing a
    buffer.
    """

    def __init__(self, model: nn.Module) -> None:
        named = model.named_modules()
        self.layers = {name: layer for name, layer in named if isinstance(layer, nn.Linear | nn.Conv2d)}
        for layer in self.layers.values():
            layer.register_buffer(MASK, torch.ones_like(layer.weight, dtype=torch.bool))
        self.weights = [layer.weight for layer in self.layers.values()]
        self.total = sum(weight.numel() for weight in self.weights)
        self.factors = [torch.empty_like(weight, requires_grad=False) for weight in self.weights]
        self.recompute_factors()

    @property
    def kept(self) -> list[Tensor]:
        """The masks themselves, one a layer: bool, true where a weight is kept."""
        return [layer.get_buffer(MASK) for layer in self.layers.values()]

    @torch.no_grad()
    def assign(self, masks: Sequence[Tensor]) -> None:
        """Replace all masks; the weights change at the next `apply`."""
        for own, mask in zip(self.kept, masks, strict=True):
            own.copy_(mask)
        self.recompute_factors()

    def recompute_factors(self) -> None:
        """Recompute the factors and the sparsity from the buffers, as after loading a checkpoint."""
        for factor, mask in zip(self.factors, self.kept, strict=True):
            factor.copy_(mask)
        self.sparsity = 1 - sum(map(count_nonzero, self.kept)) / self.total

    @torch.no_grad()
    def apply(self) -> None:
        """Set pruned weights to exactly zero."""
        torch._foreach_mul_(self.weights, self.factors)

    @torch.no_grad()
    def apply_to_state(self, optimizer: Optimizer) -> None:
        """Set the optimizer's state of pruned weights to zero: a weight that grows back starts without momentum."""
        for weight, factor in zip(self.weights, self.factors, strict=True):
            for value in optimizer.state[weight].values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    value.mul_(factor)

    def mark_pruned(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return the scores with PRUNED_SCORE for weights that are pruned already."""
        return [score.masked_fill(~kept, PRUNED_SCORE) for score, kept in zip(scores, self.kept, strict=True)]

    def compute_digest(self) -> str:
        """Return the SHA-256 of all masks, independent of the device."""
        found = hashlib.sha256()
        for name, mask in zip(self.layers, self.kept, strict=True):
            found.update(name.encode() + np.packbits(mask.cpu().numpy()).tobytes())
        return found.hexdigest()

    def assert_equal_on_ranks(self) -> str:
        """Return the hash of the masks. All ranks call it. Raises RuntimeError if their masks differ."""
        found: list[str] = objects.all_gather_json(self.compute_digest(), self.weights[0].device)
        others = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if others:
            raise RuntimeError(
                f"the masks of ranks {others} differ from rank 0's: they were computed from other weights or gradients"
            )
        return found[0]


@torch.no_grad()
def drop_and_grow(masks: Masks, optimizer: Optimizer, share: float) -> None:
    """Exchange a share of each layer's weights: the smallest go, and where gradients are largest as many come.

    Those that come begin at zero and without momentum. From RigL (Evci et al. 2019, arXiv 1911.11134); `grad` of each
    weight is its dense gradient.
    """
    staying, grown = [], []
    for weight, mask in zip(masks.weights, masks.kept, strict=True):
        assert weight.grad is not None
        count = min(int(share * count_nonzero(mask)), count_nonzero(~mask))
        stays = mask & ~select_lowest([weight.abs().masked_fill(~mask, math.inf)], count)[0]
        staying.append(stays)
        # lowest of -|gradient| is the largest gradient; +1 keeps those that stay out of it
        grown.append(stays | select_lowest([-weight.grad.abs().masked_fill(stays, -1)], count)[0])
    masks.assign(staying)
    masks.apply()  # what goes, and what comes, begins at zero and without momentum
    masks.apply_to_state(optimizer)
    masks.assign(grown)


@torch.no_grad()
def soft_threshold(weights: Sequence[Tensor], length: float) -> None:
    """Move every weight towards zero by `length`; those that are nearer become exactly zero.

    The proximal step of an L1 penalty (ISTA: Beck and Teboulle 2009, doi 10.1137/080716542).
    """
    for weight in weights:
        weight.copy_(F.softshrink(weight, length))
