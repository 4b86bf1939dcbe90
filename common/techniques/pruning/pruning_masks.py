"""Pruning masks, which select an exact number of weights by their scores and keep pruned weights at zero.

A mask is a bool tensor that is true for every weight that is kept. Scores are nonnegative, such as the magnitude of a
weight (Han et al. 2015, arXiv 1506.02626) or its first-order Taylor importance (Molchanov et al. 2019, arXiv
1906.10771). A weight that is already pruned has the score PRUNED_SCORE, so that the weight is selected for pruning
first and stays pruned. Scores and masks are lists with one tensor per layer. Each tensor has the shape of the layer's
weight: [out, in] or [out, in, kernel, kernel].
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

from common.ranks import objects
from common.system.errors import UserError

SAMPLE_SIZE = 1 << 16  # size of the sample that estimates the k-th smallest number of a larger set
PRUNED_SCORE = -1.0  # score of a weight that is already pruned
MASK = "weight_mask"  # name of the buffer that holds a layer's mask
SPARSITY_TOLERANCE = 1e-3  # a sparsity of 1/3 may be written as 0.333


# ---- selection of exactly k weights


def count_elements(tensors: Sequence[Tensor]) -> int:
    """Return the total number of elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def count_nonzero(tensor: Tensor) -> int:
    """Return the number of elements that are true or nonzero.

    This function is 20 times as fast as `sum` of a bool tensor.
    """
    return int(tensor.count_nonzero())


def find_kth_smallest(parts: Sequence[Tensor], k: int) -> Tensor:
    """Return the exact k-th smallest of all n numbers in the parts, as a 0-d tensor.

    The parts may have any shapes, and k must be from 1 to n. For a large set, a sorted sample yields a lower and an
    upper bound for the result. One pass counts the numbers below the lower bound, and only the numbers between the
    bounds are sorted. If the bounds do not enclose the result, all numbers are sorted.
    """
    flat_parts = [part.flatten() for part in parts]
    total = count_elements(parts)
    if total <= 16 * SAMPLE_SIZE:
        return torch.cat(flat_parts).kthvalue(k).values
    stride = total // SAMPLE_SIZE
    sample = torch.cat([part[::stride] for part in flat_parts]).sort().values
    middle = k * len(sample) // total
    margin = 2 * math.isqrt(len(sample))  # the margin is four standard deviations
    lower_bound = sample[max(0, middle - margin)]
    upper_bound = sample[min(len(sample) - 1, middle + margin)]

    lower_count = 0
    enclosed_parts = []
    for part in flat_parts:
        is_enclosed = part >= lower_bound
        lower_count += part.numel() - count_nonzero(is_enclosed)
        enclosed_parts.append(part[is_enclosed.logical_and_(part <= upper_bound)])
    enclosed = torch.cat(enclosed_parts)
    if lower_count < k <= lower_count + len(enclosed):
        return enclosed.kthvalue(k - lower_count).values
    return torch.cat(flat_parts).kthvalue(k).values


def select_lowest_scores(parts: Sequence[Tensor], number: int) -> list[Tensor]:
    """Return bool tensors that are true for exactly the `number` lowest scores of all parts.

    Among equal scores, the first ones are selected.
    """
    if number <= 0:
        return [torch.zeros_like(part, dtype=torch.bool) for part in parts]
    threshold = find_kth_smallest(parts, min(number, count_elements(parts)))
    selected = [part <= threshold for part in parts]
    surplus = sum(map(count_nonzero, selected)) - number
    for part, mask in zip(reversed(parts), reversed(selected), strict=True):
        if surplus > 0:
            is_tie = part.flatten() == threshold
            ties = is_tie.nonzero().flatten()[-surplus:]
            mask.view(-1)[ties] = False
            surplus -= len(ties)
    return selected


def make_global_masks(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Return masks that prune the weights with the lowest scores of all layers; `sparsity` is the fraction to prune."""
    dropped = select_lowest_scores(scores, round(sparsity * count_elements(scores)))
    return [mask.logical_not_() for mask in dropped]


def make_layer_masks(scores: Sequence[Tensor], sparsity: Sequence[float]) -> list[Tensor]:
    """Return masks that prune the weights with the lowest scores in each layer.

    `sparsity` contains the fraction of weights to prune in each layer. The numbers of weights to prune per layer are
    chosen so that rounding affects their total by less than one weight.
    """
    exact_counts = [fraction * score.numel() for score, fraction in zip(scores, sparsity, strict=True)]
    counts = list(map(math.floor, exact_counts))
    by_remainder = sorted(range(len(counts)), key=lambda layer: counts[layer] - exact_counts[layer])
    for layer in by_remainder[: round(sum(exact_counts)) - sum(counts)]:
        counts[layer] += 1
    return [~select_lowest_scores([score], count)[0] for score, count in zip(scores, counts, strict=True)]


def make_channel_masks(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Return masks that prune, in each layer, the output channels (or units) whose scores have the lowest L2 norms.

    The last layer, whose units are the classes, is not pruned. Every layer keeps at least one channel.
    """
    masks = []
    for score in scores[:-1]:
        rows = score.flatten(1)
        is_pruned = (rows < 0).all(1)
        norms = rows.clamp(min=0).norm(dim=1).masked_fill(is_pruned, PRUNED_SCORE)
        count = min(round(sparsity * len(norms)), len(norms) - 1)
        (dropped,) = select_lowest_scores([norms], count)
        channel_shape = (-1, *[1] * (score.dim() - 1))
        masks.append((~dropped).view(channel_shape).expand_as(score))
    return [*masks, torch.ones_like(scores[-1], dtype=torch.bool)]


def make_group_masks(scores: Sequence[Tensor], sparsity: float, size: int) -> list[Tensor]:
    """Return N:M masks, which prune the weights with the lowest scores in each group of `size` consecutive weights.

    All weights of a group are in the same row of the weight matrix [out, rest]. The pattern 2:4 has `size` = 4 and a
    sparsity of 0.5 (Mishra et al. 2021, arXiv 2104.08378). The number of weights to prune per group is rounded down. An
    incomplete group at the end of a row is not pruned.
    """
    drop_count = math.floor(sparsity * size + SPARSITY_TOLERANCE)
    masks = []
    for score in scores:
        mask = torch.ones_like(score, dtype=torch.bool)
        rows = mask.view(len(score), -1)
        end = score[0].numel() // size * size
        groups = score.flatten(1)[:, :end].reshape(len(score), -1, size)
        order = groups.argsort(dim=2, stable=True)
        group_masks = torch.ones_like(order, dtype=torch.bool)
        group_masks.scatter_(2, order[..., :drop_count], False)
        rows[:, :end] = group_masks.flatten(1)
        masks.append(mask)
    return masks


def allocate_erdos_renyi_sparsities(shapes: Sequence[torch.Size], sparsity: float) -> list[float]:
    """Return the sparsity of each layer under the Erdos-Renyi-Kernel distribution (Evci et al. 2019, arXiv 1911.11134).

    The density of a layer is proportional to the sum of its dimensions divided by their product, so small layers are
    pruned less than large ones. A layer whose density would exceed 1 stays fully dense. `shapes` contains the shapes of
    the weights, and `sparsity` is the overall fraction of zeros.
    """
    nonzero_budget = (1 - sparsity) * sum(shape.numel() for shape in shapes)
    dense_weights = 0
    sparse_layers = list(range(len(shapes)))
    while True:
        dimension_sum = sum(sum(shapes[i]) for i in sparse_layers)
        factor = (nonzero_budget - dense_weights) / max(1, dimension_sum)
        full_layers = [i for i in sparse_layers if factor * sum(shapes[i]) >= shapes[i].numel()]
        if not full_layers:
            break
        dense_weights += sum(shapes[i].numel() for i in full_layers)
        sparse_layers = [i for i in sparse_layers if i not in full_layers]
    sparsities = [0.0] * len(shapes)
    for i in sparse_layers:
        sparsities[i] = 1 - factor * sum(shapes[i]) / shapes[i].numel()
    return sparsities


# ---- masks of a model


class Masks:
    """Masks of the weights of a model's linear and convolutional layers.

    Biases, normalization layers and frozen weights are never pruned. The masks are bool buffers of the layers, named
    `weight_mask`, and are therefore part of checkpoints. If layers share a weight, only the first layer has a mask.
    `factors` contains the masks as tensors of the weights' dtype, because multiplying weights by such a tensor takes a
    tenth of the time of multiplying by a bool tensor. Call `recompute_factors` after changing a buffer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, nn.Linear | nn.Conv2d] = {}
        weights: set[Tensor] = set()
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.requires_grad and layer.weight not in weights:
                weights.add(layer.weight)
                self.layers[name] = layer
        if not self.layers:
            raise UserError("the network has no trainable linear or convolutional layer to prune; use another network")
        for layer in self.layers.values():
            layer.register_buffer(MASK, torch.ones_like(layer.weight, dtype=torch.bool))
        self.weights = [layer.weight for layer in self.layers.values()]
        self.weight_count = count_elements(self.weights)
        self.factors = [torch.empty_like(weight, requires_grad=False) for weight in self.weights]
        self.recompute_factors()

    @property
    def masks(self) -> list[Tensor]:
        """The masks, one bool tensor per layer. A mask is true for every weight that is kept."""
        return [layer.get_buffer(MASK) for layer in self.layers.values()]

    @torch.no_grad()
    def replace_masks(self, masks: Sequence[Tensor]) -> None:
        """Replace all masks. The weights do not change until `apply_to_weights` is called."""
        for buffer, mask in zip(self.masks, masks, strict=True):
            buffer.copy_(mask)
        self.recompute_factors()

    def recompute_factors(self) -> None:
        """Recompute the factors and the sparsity from the buffers, for example after loading a checkpoint."""
        for factor, mask in zip(self.factors, self.masks, strict=True):
            factor.copy_(mask)
        self.sparsity = 1 - sum(map(count_nonzero, self.masks)) / self.weight_count

    @torch.no_grad()
    def apply_to_weights(self) -> None:
        """Set pruned weights to exactly zero."""
        torch._foreach_mul_(self.weights, self.factors)

    @torch.no_grad()
    def apply_to_optimizer_state(self, optimizer: Optimizer) -> None:
        """Set the optimizer state of pruned weights to zero, so that regrown weights start without momentum."""
        for weight, factor in zip(self.weights, self.factors, strict=True):
            for state in optimizer.state[weight].values():
                if isinstance(state, Tensor) and state.shape == weight.shape:
                    state.mul_(factor)

    def mark_pruned_scores(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return the scores with PRUNED_SCORE for weights that are already pruned."""
        return [score.masked_fill(~mask, PRUNED_SCORE) for score, mask in zip(scores, self.masks, strict=True)]

    def compute_digest(self) -> str:
        """Return the SHA-256 digest of all masks, which does not depend on the device."""
        digest = hashlib.sha256()
        for name, mask in zip(self.layers, self.masks, strict=True):
            packed_mask = np.packbits(mask.cpu().numpy())
            digest.update(name.encode() + packed_mask.tobytes())
        return digest.hexdigest()

    def assert_equal_on_ranks(self) -> str:
        """Check that all ranks have the same masks, and return the digest of the masks.

        All ranks must call this method. Raises RuntimeError if masks differ between ranks.
        """
        device = self.weights[0].device
        digests: list[str] = objects.all_gather_json(self.compute_digest(), device)
        wrong_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if wrong_ranks:
            raise RuntimeError(
                f"the masks of ranks {wrong_ranks} differ from those of rank 0, because weights or gradients differed"
            )
        return digests[0]


@torch.no_grad()
def drop_and_grow(masks: Masks, optimizer: Optimizer, share: float) -> None:
    """Prune the weights with the smallest magnitudes, and regrow as many weights with the largest gradients.

    `share` is the fraction of each layer's remaining weights that is pruned. Regrown weights start at zero and without
    momentum. The method is RigL (Evci et al. 2019, arXiv 1911.11134). The `grad` of each weight must be the dense
    gradient, which includes the gradients of pruned weights.
    """
    remaining_masks = []
    grown_masks = []
    for weight, mask in zip(masks.weights, masks.masks, strict=True):
        assert weight.grad is not None
        count = min(int(share * count_nonzero(mask)), count_nonzero(~mask))
        magnitudes = weight.abs().masked_fill(~mask, math.inf)
        (dropped,) = select_lowest_scores([magnitudes], count)
        remaining = mask & ~dropped
        # The lowest -|gradient| belongs to the largest gradient. Remaining weights get +1, so they are not selected.
        growth_scores = -weight.grad.abs().masked_fill(remaining, -1)
        (grown,) = select_lowest_scores([growth_scores], count)
        remaining_masks.append(remaining)
        grown_masks.append(remaining | grown)
    masks.replace_masks(remaining_masks)
    masks.apply_to_weights()  # sets dropped and grown weights to zero
    masks.apply_to_optimizer_state(optimizer)
    masks.replace_masks(grown_masks)


@torch.no_grad()
def soft_threshold(weights: Sequence[Tensor], length: float) -> None:
    """Move every weight toward zero by `length`; weights whose magnitude is at most `length` become exactly zero.

    This is the proximal step of an L1 penalty (ISTA: Beck and Teboulle 2009, doi 10.1137/080716542).
    """
    for weight in weights:
        weight.copy_(F.softshrink(weight, length))
