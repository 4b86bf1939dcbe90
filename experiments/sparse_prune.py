"""Pruning: how many weights can go before accuracy does, and what that really saves.

    python experiments/sparse_prune.py                                          92 % of LeNet-300-100 goes
    python experiments/sparse_prune.py model=lenet5 sparsity=0.97 criterion=taylor
    python experiments/sparse_prune.py schedule=rigl sparsity=0.95              sparse from the first step to the last
    python experiments/sparse_prune.py scope=n:m sparsity=0.5                   two of each four weights
    python experiments/sparse_prune.py schedule=none l1=0.001                   no masks: a penalty makes the zeros
    python experiments/sparse_prune.py sweep=true repeats=5                     accuracy against sparsity, with a plot
    make exp NAME=sparse_prune NODES=2                                          on a cluster

Takes about half a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST with 8 % of the weights (without
MNIST: on the built-in digits).

How it works. Every weight gets a score, and the mask of a layer is false where the score is among the lowest. The
schedule says after which steps masks change, and to which sparsity. In between, training goes on as if nothing had
happened, and after every step weights are multiplied by their masks: gradients and momentum move a pruned weight, and
the mask puts it back to zero. What is pruned stays pruned, but for rigl.

Under ddp every process computes the masks itself, from weights that are equal and gradients that ddp has averaged, and
all compare a hash of them. The file of a pruned model is as large as before, for zeros are numbers, too; but it can be
compressed. Dense kernels multiply the zeros: what sparse ones gain, or lose, is measured at the end.
"""

from __future__ import annotations

import common  # isort: skip  # noqa: F401 (first: it answers Ctrl-C while torch is imported)

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.train_state import TrainState
from common.core import seeds
from common.data import loader as data
from common.distributed import ddp
from common.distributed.rendezvous import World
from common.measure import plots, step_timing, tables
from common.models import networks, pruning_masks, pruning_savings
from common.models.pruning_masks import Masks
from common.training import loop, optimizers, sweep
from common.training.entry_point import start
from common.training.evaluate import accuracy_alone, classify_shared
from common.training.run import Run
from configs.sparse_prune import Config

TIMED = 256  # samples of one forward, to measure what is saved


@dataclass(frozen=True)
class Parts:
    """What pruning and training work on. `model` averages gradients over all processes, if there are several."""

    cfg: Config
    world: World
    run: Run
    model: nn.Module
    masks: Masks
    optimizer: Optimizer
    loader: data.Loader
    times: step_timing.StepTimes


# ---- scores


def chance(cfg: Config, weights: Sequence[Tensor], step: int) -> list[Tensor]:
    """Random scores, the same in every process."""
    source = torch.Generator().manual_seed(seeds.derive_seed(cfg.seed, "scores", step))
    return [torch.rand(weight.shape, generator=source).to(weight) for weight in weights]


def gradients(it: Parts, step: int) -> Iterator[list[Tensor]]:
    """The weights' gradients for several batches, each averaged over all processes by ddp; use each at once.

    Which samples, follows from the seed and the step. In eval mode, so that BatchNorm learns nothing here.
    """
    cfg, images, device = it.cfg, it.loader.data, it.world.device
    it.model.eval()
    order = torch.from_numpy(data.draw_order(len(images), seeds.derive_seed(cfg.seed, "scores", step), 0))
    for batch in order[: len(order) // cfg.batch * cfg.batch].view(-1, cfg.batch)[: cfg.score_batches]:
        mine = batch.view(it.world.size, -1)[it.world.rank]
        it.model.zero_grad()
        with torch.enable_grad():
            logits = it.model(images.load_inputs(mine, device, getattr(torch, cfg.dtype)))
            F.cross_entropy(logits, images.load_targets(mine, device)).backward()
        yield [weight.grad for weight in it.masks.weights if weight.grad is not None]
    it.model.train()


@torch.no_grad()
def scores_of(it: Parts, step: int) -> list[Tensor]:
    """What each weight is worth, a tensor a layer; -1 for those that are pruned already."""
    weights = it.masks.weights
    match it.cfg.criterion:
        case "magnitude":
            scores = [weight.abs() for weight in weights]
        case "random":
            scores = chance(it.cfg, weights, step)
        case "gradient" | "taylor" as criterion:
            scores = [torch.zeros_like(weight) for weight in weights]
            for found in gradients(it, step):
                for total, weight, gradient in zip(scores, weights, found, strict=True):
                    total.add_((weight * gradient if criterion == "taylor" else gradient).abs())
    if it.cfg.normalize == "layer":
        scores = [score / score.square().mean().sqrt().clamp(min=1e-30) for score in scores]
    return [score.masked_fill(~kept, pruning_masks.GONE) for score, kept in zip(scores, it.masks.kept, strict=True)]


# ---- masks


def choose(cfg: Config, scores: list[Tensor], share: float) -> list[Tensor]:
    """The masks that leave the highest scores, at a sparsity of `share`."""
    match cfg.scope:
        case "global":
            return pruning_masks.globally(scores, share)
        case "layer":
            return pruning_masks.by_layer(scores, [share] * len(scores))
        case "structured":
            return pruning_masks.by_channel(scores, share)
        case _:
            return pruning_masks.by_group(scores, share, cfg.group()[1])


def scattered(cfg: Config, masks: Masks) -> list[Tensor]:
    """RigL's first masks: by chance, each layer as sparse as ERK says, or all alike with scope=layer."""
    shapes = [weight.shape for weight in masks.weights]
    shares = [cfg.sparsity] * len(shapes)
    if cfg.scope == "global":
        shares = pruning_masks.erdos_renyi(shapes, cfg.sparsity)
    return pruning_masks.by_layer(chance(cfg, masks.weights, 0), shares)


@torch.no_grad()
def exchange(cfg: Config, masks: Masks, optimizer: Optimizer, done: float) -> None:
    """RigL: in each layer the smallest weights go, and as many come, zero at first: those with the largest gradients.

    `done` is the share of the time until masks stay.
    """
    share = cfg.drop / 2 * (1 + math.cos(math.pi * done))
    staying, grown = [], []
    for weight, mask in zip(masks.weights, masks.kept, strict=True):
        assert weight.grad is not None
        count = min(int(share * pruning_masks.count(mask)), pruning_masks.count(~mask))
        stays = mask & ~pruning_masks.lowest([weight.abs().masked_fill(~mask, math.inf)], count)[0]
        staying.append(stays)
        # lowest of -|gradient| is the largest gradient; +1 keeps those that stay out of it
        grown.append(stays | pruning_masks.lowest([-weight.grad.abs().masked_fill(stays, -1)], count)[0])
    masks.set(staying)
    masks.apply()  # what goes, and what comes, begins at zero and without momentum
    masks.apply_to_memory(optimizer)
    masks.set(grown)


# ---- schedule


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


def prune(it: Parts, step: int) -> None:
    """Change the masks, if it is time, and see that all processes have the same."""
    cfg, masks = it.cfg, it.masks
    share = sparsity_after(cfg, step, it.run.total)
    if share is None:
        return
    if cfg.schedule != "rigl":
        chosen = choose(cfg, scores_of(it, step), share)
        masks.set([old & new for old, new in zip(masks.kept, chosen, strict=True)])  # even if a start asks for less
    elif step:
        exchange(cfg, masks, it.optimizer, step / (cfg.end * it.run.total))
    else:
        masks.set(scattered(cfg, masks))
    masks.agree()


# ---- training


@torch.no_grad()
def shrink(weights: Sequence[Tensor], length: float) -> None:
    """L1's own step: every weight moves towards zero by `length`, and those that are nearer become exactly zero."""
    for weight in weights:
        weight.copy_(F.softshrink(weight, length))


def train_epoch(it: Parts, step: int) -> int:
    """Train on the rest of the loader's epoch, or up to the run's last step; returns the steps done since the start."""
    cfg, run, masks = it.cfg, it.run, it.masks
    it.model.train()
    for x, y in it.times.batches(it.loader):
        it.optimizer.zero_grad()
        loss = F.cross_entropy(it.model(x), y)
        it.times.mark("backward")
        loss.backward()
        rate = optimizers.rate(cfg.optim, step, run.total, cfg.batch)
        optimizers.set_rate(it.optimizer, rate)
        it.optimizer.step()
        step += 1
        if cfg.l1:
            shrink(masks.weights, rate * cfg.l1)
        prune(it, step)
        if masks.sparsity:
            masks.apply()  # the step has moved pruned weights, too
        run.log(step, loss=loss.detach(), sparsity=masks.sparsity)
        run.checkpoint_or_stop(step)  # saves now and then, and leaves if it was told to
        if step == run.total:
            break
    return step


def main(cfg: Config, world: World, run: Run) -> None:
    train, test = data.load_train_test(run.prepared, cfg.data)
    dtype = getattr(torch, cfg.dtype)
    loader = data.Loader.from_config(train, cfg, world.device, shard=(world.rank, world.size))
    inner = networks.for_images(cfg.model, train.shape, train.classes).to(world.device, dtype)
    masks = Masks(inner)
    model = ddp.wrap_ddp(inner, world.device, gradient_as_bucket_view=True) if world.size > 1 else inner
    times = step_timing.StepTimes(model, world.device)
    it = Parts(cfg, world, run, model, masks, optimizers.make(model.parameters(), cfg.optim), loader, times)
    run.before_backward = times.recent  # the heartbeats tell who is slow
    run.total = loop.total_steps(cfg, loader)
    run.averaged = True  # the loss of a step is the mean over the processes

    ddp.warm_up_buckets(model, train.load_inputs(slice(0, cfg.batch // world.size), world.device, dtype))
    step = run.resume(TrainState([inner], it.optimizer, loader, world, replicated=True))
    masks.refresh()  # a checkpoint may have brought other masks
    masks.agree()
    if step == 0:
        prune(it, 0)
        masks.apply()
    scores = loop.train(
        run,
        loader,
        step,
        lambda done: train_epoch(it, done),
        lambda: classify_shared(inner, test, world, batch=cfg.eval_batch, dtype=dtype, look=run.look),
    )
    digest = masks.agree()
    if world.is_main:
        conclude(it, inner, test, scores, digest)


# ---- what it saves


def conclude(it: Parts, inner: nn.Module, test: data.Images, scores: dict[str, float], digest: str) -> None:
    """The result file and the table, on rank 0."""
    cfg, world, run, masks = it.cfg, it.world, it.run, it.masks

    def accuracy(model: nn.Module) -> float:
        return accuracy_alone(model, test, world.device, batch=cfg.eval_batch, dtype=torch.float32)

    x = test.load_inputs(slice(0, min(cfg.eval_batch, TIMED)), world.device, torch.float32)
    facts = pruning_savings.savings(inner, x, accuracy if cfg.int8 else None, run.folder.path / "model.pt2", cfg.export)
    nonzero = sum(map(pruning_masks.count, masks.weights))
    found = {"weights": masks.total, "nonzero": nonzero, "sparsity": 1 - nonzero / masks.total, "masks": digest}
    pace = {"samples_per_second": run.samples_per_second(), "step_seconds": run.step_seconds()}
    run.finish(**scores, **pace, **found, **facts, data=run.prepared.name)
    rows = loop.rows(run, world, scores) | {
        "pruning": f"{cfg.model}, {cfg.schedule}, {cfg.criterion}, {cfg.scope}",
        "weights": f"{nonzero:,} of {masks.total:,} are not zero; {masks.sparsity:.2%} are masked",
        "masks": f"{digest[:16]}, the same in {world.size} processes",
    }
    run.say(tables.table(rows | pruning_savings.rows(facts, len(x), cfg.int8) | run.places()))


def cells(cfg: Config) -> list[sweep.Cell]:
    """The dense model, and every criterion at every sparsity. n:m has one sparsity, and rigl one criterion."""
    plain: sweep.Cell = {"export": False, "int8": False}
    names = ["magnitude"] if cfg.schedule == "rigl" else cfg.criteria
    levels = [cfg.sparsity] if cfg.scope == "n:m" else [float(level) for level in cfg.levels]
    grid = [plain | {"criterion": name, "sparsity": level} for level in levels for name in names]
    return [plain | {"schedule": "none", "l1": 0}, *grid]


def show(cfg: Config, rows: list[sweep.Row], folder: Path) -> dict[str, str]:
    """Test error against the weights that are left, and the medians of all that was measured."""
    dense = {row["cell"]["seed"]: row["test_accuracy"] for row in rows if "criterion" not in row["cell"]}
    groups: dict[str, list[sweep.Row]] = {}
    for row in rows:
        cell, score = row["cell"], row["test_accuracy"]
        row |= {"error": 100 * (1 - score), "left": 100 * row["nonzero"] / row["weights"]}
        row["below"] = 100 * (dense.get(cell["seed"], math.nan) - score)  # points, for the same seed
        name = f"{cell['criterion']} {100 * cell['sparsity']:.4g} %" if "criterion" in cell else "dense"
        groups.setdefault(name, []).append(row)
    pruned = [row for row in rows if "criterion" in row["cell"]]
    left = sweep.gather(pruned, ["criterion", "sparsity"], "left")
    series: dict[str, list[tuple[float, float, float]]] = {}
    for cell, (mean, deviation, _) in sweep.gather(pruned, ["criterion", "sparsity"], "error").items():
        series.setdefault(cell[0], []).append((left[cell][0], mean, deviation))
    levels = {"dense": fmean(row["error"] for row in groups["dense"])} if "dense" in groups else {}
    title = f"{cfg.model} on {rows[0]['data']}"
    plots.curves(folder / "sparsity.png", series, "weights left, %", "test error, %", levels, log=True, title=title)
    return {
        "medians": pruning_savings.table(groups),
        "CSR": pruning_savings.verdict(groups),
        "plot": str(folder / "sparsity.png"),
    }


if __name__ == "__main__":
    start(main, Config, sweep.Sweep(cells, show, new_seeds=True))
