"""Pruning: how many weights can be removed before accuracy drops, and what pruning saves.

    python experiments/sparse_prune.py                                          removes 92 % of the weights
    python experiments/sparse_prune.py model=lenet5 sparsity=0.97 criterion=taylor
    python experiments/sparse_prune.py schedule=rigl sparsity=0.95              sparse from the first step to the last
    python experiments/sparse_prune.py scope=n:m sparsity=0.5                   two of every four weights
    python experiments/sparse_prune.py schedule=none l1=0.001                   no masks: a penalty creates the zeros
    python experiments/sparse_prune.py sweep=true repeats=5                     accuracy against sparsity, with a plot
    make exp NAME=sparse_prune NODES=2                                          on a cluster

A run takes about half a minute on 2 CPU cores. Expect a test accuracy of 98 % on MNIST with 8 % of the weights. If
MNIST is not available, the built-in digits are used instead.

Every weight gets a score, and the mask is false for the weights with the lowest scores. The settings are:

    criterion  magnitude (Han et al. 2015, arXiv 1506.02626), gradient, |weight x gradient| (Taylor: Molchanov et al.
               2016, arXiv 1611.06440; 2019, arXiv 1906.10771), or random
    scope      all layers together, each layer, whole channels, or groups of four (2:4: Mishra et al. 2021, arXiv
               2104.08378)
    schedule   when to prune and to which sparsity: once, in rounds, cubic (Zhu & Gupta 2017, arXiv 1710.01878), or
               RigL, which keeps small layers denser (ERK; both Evci et al. 2019, arXiv 1911.11134):
               common/techniques/pruning/pruning_schedules.py

Training itself does not change. After every step, the weights are multiplied by their masks, because gradients and
momentum also change pruned weights. Except with RigL, a pruned weight stays pruned. Without masks, the proximal step of
an L1 penalty (ISTA: Beck & Teboulle 2009, doi 10.1137/080716542) also creates exact zeros.

With DDP, every rank computes the masks locally, from equal weights and from gradients that DDP has averaged. All ranks
then compare a hash of the masks. The file of a pruned model is as large as before, because zeros are stored as numbers,
but it compresses well. Dense kernels multiply by the zeros, too. The gain or loss from sparse kernels is therefore
measured at the end.
"""

from __future__ import annotations

from common.api import ReportData, Run, UserError, build_network, build_optimizer, start
from common.models.sample_dropout import add_dropout
from common.system import seeds
from common.techniques.data_parallel import ddp
from common.techniques.pruning import pruning_masks, pruning_savings, pruning_schedules
from common.techniques.pruning.pruning_masks import Masks
from common.training.evaluate import measure_accuracy
from configs.sparse_prune import Config

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MAX_TIMED_SAMPLES = 256  # maximum batch size of the forward passes that are timed


# ---- scores: the importance of each weight


def score_weights(cfg: Config, run: Run, model: nn.Module, masks: Masks, step: int) -> list[Tensor]:
    """Return the scores of all weights. Pruned weights have the lowest score.

    The scores of a layer are a tensor of the same shape as the layer's weights.
    """
    weights = [weight.detach() for weight in masks.weights]
    match cfg.criterion:
        case "magnitude":
            scores = [weight.abs() for weight in weights]
        case "random":
            scores = draw_random_scores(cfg, weights, step)
        case "gradient" | "taylor" as criterion:
            scores = [torch.zeros_like(weight) for weight in weights]
            for gradients in compute_gradients(cfg, run, model, masks, step):
                for score, weight, gradient in zip(scores, weights, gradients, strict=True):
                    change = weight * gradient if criterion == "taylor" else gradient
                    score.add_(change.abs())
    if cfg.normalize == "layer":
        scores = [score / score.square().mean().sqrt().clamp(min=1e-30) for score in scores]
    return masks.mark_pruned_scores(scores)


def draw_random_scores(cfg: Config, weights: Sequence[Tensor], step: int) -> list[Tensor]:
    """Draw random scores, which are the same on every rank."""
    generator = torch.Generator().manual_seed(seeds.derive_seed(cfg.seed, "scores", step))
    return [torch.rand(weight.shape, generator=generator).to(weight) for weight in weights]


def compute_gradients(cfg: Config, run: Run, model: nn.Module, masks: Masks, step: int) -> Iterator[list[Tensor]]:
    """Yield the gradients of the masked weights for each of several random batches.

    DDP averages the gradients over all ranks. The gradients are overwritten when the next batch is computed.
    """
    model.eval()  # keeps BatchNorm's running statistics unchanged
    for x, y in run.draw_random_batches(cfg.score_batches, seeds.derive_seed(cfg.seed, "scores", step)):
        model.zero_grad()
        run.loss(model(x), y).backward()
        yield [weight.grad for weight in masks.weights if weight.grad is not None]
    model.train()


# ---- masks: the weights that are kept


def choose_masks(cfg: Config, scores: list[Tensor], sparsity: float) -> list[Tensor]:
    """Create masks that keep the weights with the highest scores."""
    match cfg.scope:
        case "global":
            return pruning_masks.make_global_masks(scores, sparsity)
        case "layer":
            return pruning_masks.make_layer_masks(scores, [sparsity] * len(scores))
        case "structured":
            return pruning_masks.make_channel_masks(scores, sparsity)
        case _:
            return pruning_masks.make_group_masks(scores, sparsity, cfg.parse_pattern()[1])


def draw_initial_masks(cfg: Config, masks: Masks) -> list[Tensor]:
    """Draw the first masks of RigL.

    With scope=layer, all layers have the same sparsity. With scope=global, the sparsities follow ERK.
    """
    shapes = [weight.shape for weight in masks.weights]
    sparsities = [cfg.sparsity] * len(shapes)
    if cfg.scope == "global":
        sparsities = pruning_masks.allocate_erdos_renyi_sparsities(shapes, cfg.sparsity)
    return pruning_masks.make_layer_masks(draw_random_scores(cfg, masks.weights, 0), sparsities)


def update_masks(cfg: Config, run: Run, model: nn.Module, masks: Masks, optimizer: Optimizer, step: int) -> None:
    """Update the masks if the schedule requires an update after this step.

    Raises RuntimeError if the updated masks differ between ranks.
    """
    sparsity = pruning_schedules.compute_sparsity(cfg, step, run.total)
    if sparsity is None:
        return
    if cfg.schedule == "rigl" and step:
        progress = step / (cfg.end * run.total)
        share = cfg.drop / 2 * (1 + math.cos(math.pi * progress))
        pruning_masks.drop_and_grow(masks, optimizer, share)
    else:
        prune(cfg, run, model, masks, step, sparsity)
    masks.assert_equal_on_ranks()


def prune(cfg: Config, run: Run, model: nn.Module, masks: Masks, step: int, sparsity: float) -> None:
    """Prune further weights until the masks have this sparsity (0 to 1). Pruned weights stay pruned."""
    if cfg.schedule == "rigl" and not masks.sparsity:
        masks.replace_masks(draw_initial_masks(cfg, masks))
        return
    new_masks = choose_masks(cfg, score_weights(cfg, run, model, masks, step), sparsity)
    masks.replace_masks([old & new for old, new in zip(masks.masks, new_masks, strict=True)])


def start_pruning(cfg: Config, run: Run, model: nn.Module, masks: Masks, optimizer: Optimizer) -> None:
    """Load the checkpoint, and prune the weights that the schedule has pruned by its step.

    If the run is resumed with other settings, such as fewer epochs, updates that it has not executed may lie before the
    step of the checkpoint.
    """
    step = run.resume()
    masks.recompute_factors()  # the checkpoint may contain different masks
    sparsity = pruning_schedules.compute_reached_sparsity(cfg, step, run.total)
    if step == 0:
        update_masks(cfg, run, model, masks, optimizer, 0)
        masks.apply_to_weights()
    elif masks.sparsity < sparsity - pruning_masks.SPARSITY_TOLERANCE:
        prune(cfg, run, model, masks, step, sparsity)
        masks.assert_equal_on_ranks()
        masks.apply_to_weights()


def main(cfg: Config, run: Run) -> None:
    if cfg.int8 and not run.train_set.has_labels:
        raise UserError("int8=true reports the accuracy, which needs class labels; use int8=false")
    inner_model: nn.Module = build_network(cfg.model, run.sample_shape, run.outputs)
    add_dropout(inner_model, cfg.regularization.dropout, cfg.seed).to(run.device, run.dtype)
    masks = Masks(inner_model)
    model = inner_model
    if run.world.size > 1:
        model = ddp.replicate(inner_model, run, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    run.register(inner_model, optimizer, run.batches(shard=run.shard), replicated=True)  # masks are buffers
    start_pruning(cfg, run, model, masks, optimizer)

    for step in run.steps():
        optimizer.zero_grad()
        loss = run.loss(model(step.x), step.y)
        step.log(loss=loss)
        loss.backward()
        step.clip_gradients(model.parameters(), cfg.regularization.clip)
        optimizer.step()
        if cfg.l1:
            pruning_masks.soft_threshold(masks.weights, step.rate * cfg.l1)
        update_masks(cfg, run, model, masks, optimizer, step.number)
        if masks.sparsity:
            masks.apply_to_weights()  # the optimizer also changed pruned weights
        step.log(sparsity=masks.sparsity)
    run.report(*report_pruning(cfg, run, inner_model, masks))


def report_pruning(cfg: Config, run: Run, model: nn.Module, masks: Masks) -> list[ReportData]:
    """Measure the remaining weights and the savings.

    All ranks must call this function, but only rank 0 returns a report.
    """
    masks.assert_equal_on_ranks()
    if not run.world.is_main:
        return []
    timed_samples = slice(0, min(cfg.eval_batch, MAX_TIMED_SAMPLES))
    images = run.test_set.load_inputs(timed_samples, run.device, torch.float32)
    score = partial(measure_accuracy, test=run.test_set, device=run.device, batch=cfg.eval_batch, dtype=torch.float32)
    return [pruning_savings.report_savings(cfg, model, masks, images, score, run.folder.path / "model.pt2")]


if __name__ == "__main__":
    start(main, Config)
