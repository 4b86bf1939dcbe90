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

Every weight gets a score, such as its magnitude (Han et al. 2015, arXiv 1506.02626) or |weight x gradient| (Taylor:
Molchanov et al. 2016, arXiv 1611.06440), and the mask of a layer is false where the score is among the lowest. The
schedule says after which steps masks change, and to which sparsity (cubic: Zhu & Gupta 2017, arXiv 1710.01878; RigL:
Evci et al. 2019, arXiv 1911.11134). In between, training goes on as if nothing had happened, and after every step
weights are multiplied by their masks: gradients and momentum move a pruned weight, and the mask puts it back to zero.
What is pruned stays pruned, but for RigL.

Under DDP every rank computes the masks itself, from weights that are equal and gradients that DDP has averaged, and
all compare a hash of them. The file of a pruned model is as large as before, for zeros are numbers, too; but it can be
compressed. Dense kernels multiply the zeros: what sparse ones gain, or lose, is measured at the end.
"""

from __future__ import annotations

from common.api import Facts, Run, TrainState, build_optimizer, classify_replicated, ddp, networks, start
from common.core import seeds
from common.data import loader as data
from common.models import pruning_masks, pruning_savings
from common.models.pruning_masks import Masks
from common.training.evaluate import accuracy_alone
from configs.sparse_prune import Config

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

TIMED = 256  # samples of one forward, to measure what is saved


# ---- scores: what each weight is worth


def random_scores(cfg: Config, weights: Sequence[Tensor], step: int) -> list[Tensor]:
    """Random scores, the same on every rank."""
    source = torch.Generator().manual_seed(seeds.derive_seed(cfg.seed, "scores", step))
    return [torch.rand(weight.shape, generator=source).to(weight) for weight in weights]


@dataclass(frozen=True)
class Pruner:
    """Chooses the masks of a model's weights. `model` averages gradients over all ranks, if there are several."""

    cfg: Config
    run: Run
    model: nn.Module
    masks: Masks
    optimizer: Optimizer

    def gradients(self, step: int) -> Iterator[list[Tensor]]:
        """The weights' gradients for several batches, each averaged over all ranks by DDP; use each at once.

        Which samples, follows from the seed and the step. In eval mode, so that BatchNorm learns nothing here.
        """
        cfg, run, images = self.cfg, self.run, self.run.train_set
        self.model.eval()
        order = torch.from_numpy(data.draw_order(len(images), seeds.derive_seed(cfg.seed, "scores", step), 0))
        for batch in order[: len(order) // cfg.batch * cfg.batch].view(-1, cfg.batch)[: cfg.score_batches]:
            mine = batch.view(run.world.size, -1)[run.world.rank]
            self.model.zero_grad()
            with torch.enable_grad():
                logits = self.model(images.load_inputs(mine, run.device, run.dtype))
                F.cross_entropy(logits, images.load_targets(mine, run.device)).backward()
            yield [weight.grad for weight in self.masks.weights if weight.grad is not None]
        self.model.train()

    @torch.no_grad()
    def scores(self, step: int) -> list[Tensor]:
        """What each weight is worth, a tensor a layer of its shape; -1 for those that are pruned already."""
        weights = self.masks.weights
        match self.cfg.criterion:
            case "magnitude":
                scores = [weight.abs() for weight in weights]
            case "random":
                scores = random_scores(self.cfg, weights, step)
            case "gradient" | "taylor" as criterion:
                scores = [torch.zeros_like(weight) for weight in weights]
                for found in self.gradients(step):
                    for total, weight, gradient in zip(scores, weights, found, strict=True):
                        total.add_((weight * gradient if criterion == "taylor" else gradient).abs())
        if self.cfg.normalize == "layer":
            scores = [score / score.square().mean().sqrt().clamp(min=1e-30) for score in scores]
        return [
            score.masked_fill(~kept, pruning_masks.PRUNED_SCORE)
            for score, kept in zip(scores, self.masks.kept, strict=True)
        ]

    def prune(self, step: int) -> None:
        """Change the masks, if it is time after so many steps, and check that all ranks have the same."""
        cfg, masks, total = self.cfg, self.masks, self.run.total
        sparsity = sparsity_after(cfg, step, total)
        if sparsity is None:
            return
        if cfg.schedule != "rigl":
            chosen = choose_masks(cfg, self.scores(step), sparsity)
            masks.assign(
                [old & new for old, new in zip(masks.kept, chosen, strict=True)]
            )  # even if an attempt asks less
        elif step:
            drop_and_grow(cfg, masks, self.optimizer, step / (cfg.end * total))
        else:
            masks.assign(random_masks(cfg, masks))
        masks.assert_equal()


# ---- masks: which weights stay


def choose_masks(cfg: Config, scores: list[Tensor], sparsity: float) -> list[Tensor]:
    """The masks that leave the highest scores."""
    match cfg.scope:
        case "global":
            return pruning_masks.prune_globally(scores, sparsity)
        case "layer":
            return pruning_masks.prune_layers(scores, [sparsity] * len(scores))
        case "structured":
            return pruning_masks.prune_channels(scores, sparsity)
        case _:
            return pruning_masks.prune_groups(scores, sparsity, cfg.group()[1])


def random_masks(cfg: Config, masks: Masks) -> list[Tensor]:
    """RigL's first masks, random: each layer as sparse as ERK says (arXiv 1911.11134), or all alike (scope=layer)."""
    shapes = [weight.shape for weight in masks.weights]
    sparsities = [cfg.sparsity] * len(shapes)
    if cfg.scope == "global":
        sparsities = pruning_masks.allocate_erdos_renyi(shapes, cfg.sparsity)
    return pruning_masks.prune_layers(random_scores(cfg, masks.weights, 0), sparsities)


@torch.no_grad()
def drop_and_grow(cfg: Config, masks: Masks, optimizer: Optimizer, done: float) -> None:
    """RigL: in each layer the smallest weights go, and as many come, zero at first: those with the largest gradients.

    `done` is the share of the time until masks stay.
    """
    share = cfg.drop / 2 * (1 + math.cos(math.pi * done))
    staying, grown = [], []
    for weight, mask in zip(masks.weights, masks.kept, strict=True):
        assert weight.grad is not None
        count = min(int(share * pruning_masks.count_nonzero(mask)), pruning_masks.count_nonzero(~mask))
        stays = mask & ~pruning_masks.select_lowest([weight.abs().masked_fill(~mask, math.inf)], count)[0]
        staying.append(stays)
        # lowest of -|gradient| is the largest gradient; +1 keeps those that stay out of it
        grown.append(stays | pruning_masks.select_lowest([-weight.grad.abs().masked_fill(stays, -1)], count)[0])
    masks.assign(staying)
    masks.apply()  # what goes, and what comes, begins at zero and without momentum
    masks.apply_to_state(optimizer)
    masks.assign(grown)


# ---- schedule: when masks change


def sparsity_after(cfg: Config, step: int, total: int) -> float | None:
    """The sparsity that masks get after so many steps of the run; None where they stay as they are."""
    begin, end = round(cfg.begin * total), round(cfg.end * total)
    match cfg.schedule:
        case "oneshot":
            return cfg.sparsity if step == begin else None
        case "iterative":
            marks = [begin + (end - begin) * i // cfg.rounds for i in range(1, cfg.rounds + 1)]
            done = sum(mark <= step for mark in marks)  # in a short run several may fall on one step
            return 1 - (1 - cfg.sparsity) ** (done / cfg.rounds) if step in marks else None
        case "cubic":
            due = begin < step < end and (step - begin) % cfg.every == 0
            left = (end - step) / max(1, end - begin)
            return cfg.sparsity * (1 - left**3) if due or step == end else None
        case "rigl":
            return cfg.sparsity if step == 0 or (step < end and step % cfg.every == 0) else None
    return None


@torch.no_grad()
def soft_threshold(weights: Sequence[Tensor], length: float) -> None:
    """The proximal step of L1 (Beck & Teboulle 2009, ISTA): every weight moves towards zero by `length`.

    Those that are nearer become exactly zero.
    """
    for weight in weights:
        weight.copy_(F.softshrink(weight, length))


def main(cfg: Config, run: Run) -> None:
    inner = networks.build_network(cfg.model, run.sample_shape, run.classes).to(run.device, run.dtype)
    masks = Masks(inner)
    model = ddp.wrap_ddp(inner, run.device, gradient_as_bucket_view=True) if run.world.size > 1 else inner
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    pruner = Pruner(cfg, run, model, masks, optimizer)
    batches = run.batches(shard=run.shard)
    ddp.warm_up_buckets(model, run.example(cfg.plan.shard))
    state = TrainState([inner], optimizer, batches, run.world, replicated=True)

    done = run.resume(state)
    masks.refresh()  # a checkpoint may have brought other masks
    masks.assert_equal()
    if done == 0:
        pruner.prune(0)
        masks.apply()
    for step in run.steps(state, lambda: classify_replicated(inner, run)):
        with step:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(step.x), step.y)
            step.mark("backward")
            loss.backward()
            optimizer.step()
            if cfg.l1:
                soft_threshold(masks.weights, step.rate * cfg.l1)
            pruner.prune(step.number)
            if masks.sparsity:
                masks.apply()  # the step has moved pruned weights, too
            step.log(loss=loss.detach(), sparsity=masks.sparsity)
    run.report(*summarise(cfg, run, inner, masks))


def summarise(cfg: Config, run: Run, model: nn.Module, masks: Masks) -> list[Facts]:
    """What pruning has left, and what it saves. All ranks call it; rank 0 measures."""
    digest, test = masks.assert_equal(), run.test_set
    if not run.world.is_main:
        return []

    def accuracy(model: nn.Module) -> float:
        return accuracy_alone(model, test, run.device, batch=cfg.eval_batch, dtype=torch.float32)

    x = test.load_inputs(slice(0, min(cfg.eval_batch, TIMED)), run.device, torch.float32)
    path = run.folder.path / "model.pt2"
    saved = pruning_savings.measure_savings(model, x, accuracy if cfg.int8 else None, path, cfg.export)
    nonzero = sum(map(pruning_masks.count_nonzero, masks.weights))
    outcome = {"weights": masks.total, "nonzero": nonzero, "sparsity": 1 - nonzero / masks.total, "masks": digest}
    outcome |= {name: value for name, value in saved.items() if name not in pruning_savings.MEASURED}
    shown = {
        "pruning": f"{cfg.model}, {cfg.schedule}, {cfg.criterion}, {cfg.scope}",
        "weights": f"{nonzero:,} of {masks.total:,} are not zero; {masks.sparsity:.2%} are masked",
        "masks": digest[:16] + (f", the same on {run.world.size} ranks" if run.world.size > 1 else ""),
    }
    measured = {name: value for name, value in saved.items() if name in pruning_savings.MEASURED}
    return [Facts(shown | pruning_savings.format_rows(saved, len(x), cfg.int8), outcome, measured)]


if __name__ == "__main__":
    start(main, Config)
