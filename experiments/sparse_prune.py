"""Pruning: how many weights can go before accuracy does, and what that really saves.

    python experiments/sparse_prune.py                                          92 % of LeNet-300-100 goes
    python experiments/sparse_prune.py model=lenet5 sparsity=0.97 criterion=taylor
    python experiments/sparse_prune.py schedule=rigl sparsity=0.95              sparse from the first step to the last
    python experiments/sparse_prune.py scope=n:m sparsity=0.5                   two of each four weights
    python experiments/sparse_prune.py schedule=none l1=0.001                   no masks: a penalty makes the zeros
    python experiments/sparse_prune.py sweep=true repeats=5                     accuracy against sparsity, with a plot
    make exp NAME=sparse_prune NODES=2                                          on a cluster

Takes about half a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST with 8 % of the weights (without MNIST: on
the built-in digits).

Every weight gets a score, and masks are false where the score is among the lowest:

    criterion  magnitude (Han et al. 2015, arXiv 1506.02626), gradient, |weight x gradient| (Taylor: Molchanov et al.
               2016, arXiv 1611.06440; 2019, arXiv 1906.10771), or chance
    scope      all layers together, each layer, whole channels, or groups of four (2:4: Mishra et al. 2021, arXiv
               2104.08378)
    schedule   when, and to which sparsity: once, in rounds, cubic (Zhu & Gupta 2017, arXiv 1710.01878), or RigL, with
               denser small layers (ERK; both Evci et al. 2019, arXiv 1911.11134): common/models/pruning_schedules.py

In between, training goes on as if nothing had happened, and after every step weights are multiplied by their masks:
gradients and momentum move a pruned weight, and the mask puts it back to zero. What is pruned stays pruned, but for
RigL. Without masks, the proximal step of an L1 penalty (ISTA: Beck & Teboulle 2009, doi 10.1137/080716542) makes exact
zeros, too.

Under DDP every rank computes the masks itself, from weights that are equal and gradients that DDP has averaged, and
all compare a hash of them. The file of a pruned model is as large as before, for zeros are numbers, too; but it can be
compressed. Dense kernels multiply the zeros: what sparse ones gain, or lose, is measured at the end.
"""

from __future__ import annotations

from common.api import Facts, Run, TrainState, build_optimizer, ddp, networks, score_replicated, start
from common.core import seeds
from common.models import pruning_masks, pruning_savings, pruning_schedules
from common.models.pruning_masks import Masks
from common.training.evaluate import measure_accuracy
from configs.sparse_prune import Config

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

TIMED = 256  # samples of one forward, to measure what is saved


# ---- scores: the importance of each weight


def score_weights(cfg: Config, run: Run, model: nn.Module, masks: Masks, step: int) -> list[Tensor]:
    """Return the importance of each weight, one tensor a layer of the weight's shape; pruned ones score lowest."""
    weights = [weight.detach() for weight in masks.weights]
    match cfg.criterion:
        case "magnitude":
            scores = [weight.abs() for weight in weights]
        case "random":
            scores = draw_scores(cfg, weights, step)
        case "gradient" | "taylor" as criterion:
            scores = [torch.zeros_like(weight) for weight in weights]
            for gradients in compute_gradients(cfg, run, model, masks, step):
                for total, weight, gradient in zip(scores, weights, gradients, strict=True):
                    total.add_((weight * gradient if criterion == "taylor" else gradient).abs())
    if cfg.normalize == "layer":
        scores = [score / score.square().mean().sqrt().clamp(min=1e-30) for score in scores]
    return masks.mark_pruned(scores)


def draw_scores(cfg: Config, weights: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return random scores, the same on every rank."""
    source = torch.Generator().manual_seed(seeds.derive_seed(cfg.seed, "scores", step))
    return [torch.rand(weight.shape, generator=source).to(weight) for weight in weights]


def compute_gradients(cfg: Config, run: Run, model: nn.Module, masks: Masks, step: int) -> Iterator[list[Tensor]]:
    """Yield the gradients of the masked weights for several random batches, each averaged over all ranks by DDP.

    The next batch overwrites them. In eval mode, so that BatchNorm's running statistics stay.
    """
    model.eval()
    for x, y in run.draw_batches(cfg.score_batches, seeds.derive_seed(cfg.seed, "scores", step)):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        yield [weight.grad for weight in masks.weights if weight.grad is not None]
    model.train()


# ---- masks: which weights stay


def choose_masks(cfg: Config, scores: list[Tensor], sparsity: float) -> list[Tensor]:
    """Return the masks that keep the highest scores."""
    match cfg.scope:
        case "global":
            return pruning_masks.make_global_masks(scores, sparsity)
        case "layer":
            return pruning_masks.make_layer_masks(scores, [sparsity] * len(scores))
        case "structured":
            return pruning_masks.make_channel_masks(scores, sparsity)
        case _:
            return pruning_masks.make_group_masks(scores, sparsity, cfg.parse_pattern()[1])


def draw_masks(cfg: Config, masks: Masks) -> list[Tensor]:
    """Return RigL's first masks, random: layers as sparse as ERK says, or with scope=layer all alike."""
    shapes = [weight.shape for weight in masks.weights]
    erk = cfg.scope == "global"
    sparsities = pruning_masks.allocate_erdos_renyi(shapes, cfg.sparsity) if erk else [cfg.sparsity] * len(shapes)
    return pruning_masks.make_layer_masks(draw_scores(cfg, masks.weights, 0), sparsities)


def update_masks(cfg: Config, run: Run, model: nn.Module, masks: Masks, optimizer: Optimizer, step: int) -> None:
    """Change the masks if the schedule does so after this step, and check that all ranks have the same."""
    sparsity = pruning_schedules.compute_sparsity(cfg, step, run.total)
    if sparsity is None:
        return
    if cfg.schedule != "rigl":
        chosen = choose_masks(cfg, score_weights(cfg, run, model, masks, step), sparsity)
        masks.assign([old & new for old, new in zip(masks.kept, chosen, strict=True)])  # none grows back
    elif step:
        share = cfg.drop / 2 * (1 + math.cos(math.pi * step / (cfg.end * run.total)))
        pruning_masks.drop_and_grow(masks, optimizer, share)
    else:
        masks.assign(draw_masks(cfg, masks))
    masks.assert_equal_on_ranks()


def main(cfg: Config, run: Run) -> None:
    inner = networks.build_network(cfg.model, run.sample_shape, run.classes).to(run.device, run.dtype)
    masks = Masks(inner)
    model = ddp.wrap_ddp(inner, run.device, gradient_as_bucket_view=True) if run.world.size > 1 else inner
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    batches = run.batches(shard=run.shard)
    ddp.warm_up_buckets(model, run.load_example(cfg.batch_plan.shard))
    state = TrainState([inner], optimizer, batches, run.world, replicated=True)

    done = run.resume(state)
    masks.recompute_factors()  # a checkpoint may have brought other masks
    masks.assert_equal_on_ranks()
    if done == 0:
        update_masks(cfg, run, model, masks, optimizer, 0)
        masks.apply()
    for step in run.steps(state, lambda: score_replicated(inner, run)):
        with step:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(step.x), step.y)
            step.mark("backward")
            loss.backward()
            optimizer.step()
            if cfg.l1:
                pruning_masks.soft_threshold(masks.weights, step.rate * cfg.l1)
            update_masks(cfg, run, model, masks, optimizer, step.number)
            if masks.sparsity:
                masks.apply()  # the step has moved pruned weights, too
            step.log(loss=loss.detach(), sparsity=masks.sparsity)
    run.report(*report_pruning(cfg, run, inner, masks))


def report_pruning(cfg: Config, run: Run, model: nn.Module, masks: Masks) -> list[Facts]:
    """Measure what pruning has left and what it saves. All ranks call it; the report is rank 0's."""
    masks.assert_equal_on_ranks()
    if not run.world.is_main:
        return []
    x = run.test_set.load_inputs(slice(0, min(cfg.eval_batch, TIMED)), run.device, torch.float32)
    score = partial(measure_accuracy, test=run.test_set, device=run.device, batch=cfg.eval_batch, dtype=torch.float32)
    return [pruning_savings.report_savings(cfg, model, masks, x, score, run.folder.path / "model.pt2")]


if __name__ == "__main__":
    start(main, Config)
