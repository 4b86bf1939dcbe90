"""Train many cases of amp_accum of one world size in one launch, for test_amp.py and test_pitfalls_amp.py to compare.

    python -m tests.harness.amp_parity OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with one of MISTAKES, which the experiment then makes; or with one of PLANTS, something infinite on
the last process; or with `count`, which counts what ddp really exchanges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.config import config
from common.data.loader import Loader
from common.data.prepare import PreparedDataset
from common.measure.memory import MemoryMeter
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training.run import Run
from configs.amp_accum import Config
from experiments import amp_accum
from tests.harness import reference
from tests.harness.cases import prepare_for, save_cases, sums_of_ranks, train_script

CASE = {
    "data.name": "digits",
    "data.train_limit": "500",  # 83 microbatches of 6: twenty windows of 4 in an epoch, and one of 3
    "data.test_limit": "101",
    "model": "mlp",
    "precision": "fp32",
    "dtype": "float64",
    "launch.threads": "1",
    "batch": "24",
    "eval_batch": "16",
    "optim.lr": "0.05",
    "optim.base_batch": "24",
    "optim.warmup": "5",
    "optim.decay": "cosine",
    "clip": "2",
    "epochs": "2",
    "steps": "30",
    "seed": "7",
    "data.block": "3",
    "processes_per_node": "1",
    "checkpoint.every_seconds": "0",
}
QUICK = CASE | {"dtype": "float32", "data.train_limit": "2000", "batch": "32", "optim.base_batch": "32"}
QUICK |= {"optim.lr": "0.1", "clip": "0.5"}
PLANTS = ("inf_gradient", "nan_loss")
AT = 10  # the microbatch that is spoilt: the second of step 3


# ---- mistakes: each is called in place of a function of the experiment, with the right one before its arguments


@contextlib.contextmanager
def losses_times(factor: float) -> Iterator[None]:
    """Let the experiment's loss be so many times as large."""

    def cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return factor * F.cross_entropy(logits, targets, **options)

    with unittest.mock.patch.object(amp_accum, "F", SimpleNamespace(cross_entropy=cross_entropy)):
        yield


def add_up_the_sum(right: Any, cfg: Config, model: nn.Module, scaler: Any, step: Any, *rest: Any) -> Any:
    """Not the mean over a step's microbatches."""
    with losses_times(len(step.batch)):
        return right(cfg, model, scaler, step, *rest)


def add_up_with_one_divisor(right: Any, cfg: Config, model: nn.Module, scaler: Any, step: Any, *rest: Any) -> Any:
    """An epoch's last step may have fewer microbatches, and is divided as a full one."""
    with losses_times(len(step.batch) / cfg.accumulate):
        return right(cfg, model, scaler, step, *rest)


class FullWindows(Loader):
    """Leaves out what an epoch has beyond its full windows."""

    def __iter__(self) -> Iterator[list[tuple[Any, Any]]]:
        return (window for window in super().__iter__() if len(window) == self.microbatches)


class FullWindowsRun(Run):
    def microbatches(self, count: int, **options: Any) -> Loader:
        loader = super().microbatches(count, **options)
        loader.__class__ = FullWindows
        return loader


class Reluctant:
    """A scaler that unscales when it takes the step, not when it is told to."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scaler, name)

    def unscale_(self, optimizer: Optimizer) -> None:
        pass


def update_clipping_first(right: Any, cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> Any:
    return right(cfg, model, optimizer, Reluctant(scaler))


def wrap_with_forwards_outside(right: Any, *given: Any) -> nn.Module:
    """Every forward is as outside no_sync, which only the backward is inside of."""
    model: nn.Module = right(*given)
    inside: list[bool] = []

    def leave(ddp: Any, _: Any) -> None:
        inside.append(ddp.require_backward_grad_sync)  # what no_sync sets
        ddp.require_backward_grad_sync = True

    def enter(ddp: Any, *_: Any) -> None:
        ddp.require_backward_grad_sync = inside.pop()

    model.register_forward_pre_hook(leave)
    model.register_forward_hook(enter)
    return model


def make_scaler_for_bf16(right: Any, cfg: Config, device: torch.device) -> Any:
    return right(dataclasses.replace(cfg, precision="fp16") if cfg.precision == "bf16" else cfg, device)


def make_scaler_of_old(right: Any, cfg: Config, device: torch.device) -> Any:
    """With the class that torch.amp.GradScaler replaces."""

    def old(kind: str, *sizes: Any, **options: Any) -> Any:
        return torch.cuda.amp.GradScaler(*sizes, **options)

    with unittest.mock.patch.object(amp_accum, "GradScaler", old):
        return right(cfg, device)


# the name of the experiment's function, and what stands in for it
MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "no_divisor": ("accumulate_gradients", add_up_the_sum),
    "same_divisor": ("accumulate_gradients", add_up_with_one_divisor),
    "clip_before_unscale": ("update_weights", update_clipping_first),
    "forward_outside": ("wrap_model", wrap_with_forwards_outside),
    "scaler_for_bf16": ("make_scaler", make_scaler_for_bf16),
    "old_spelling": ("make_scaler", make_scaler_of_old),
}


@contextlib.contextmanager
def made(mistake: str) -> Iterator[None]:
    """Let the experiment make a mistake, if one is named."""
    with contextlib.ExitStack() as stack:
        if mistake in MISTAKES:
            name, wrong = MISTAKES[mistake]
            wrong = functools.partial(wrong, getattr(amp_accum, name))
            stack.enter_context(unittest.mock.patch.object(amp_accum, name, wrong))
        yield


# ---- cases


def settings(text: str) -> tuple[Config, str]:
    """The settings of a case, and what is special about it, if anything."""
    words = re.split(r",(?![^\[]*\])", text)
    special = words.pop(0) if "=" not in words[0] else ""
    assert special in ("", "count", "last_window_dropped", *MISTAKES, *PLANTS)
    chosen = dict(word.split("=") for word in words)
    return config.build_config(Config, [(QUICK if "precision" in chosen else CASE) | chosen]), special


@functools.cache
def expected(cache: Path, case: str) -> dict[str, Any]:
    """One process that takes each window as one batch; an epoch's last batch holds the full microbatches that are
    left."""
    cfg, _ = settings(case)
    prepared = prepare_for(cfg, str(cache))
    torch.manual_seed(1234)
    model = networks.SimpleNN() if cfg.model == "mlp" else networks.ConvNet((28, 28), 10)
    return reference.trained(cfg, model.double(), prepared, grain=cfg.batch // cfg.accumulate)


def plant(special: str, model: nn.Module, world: World) -> None:
    """Make the gradient or the loss of microbatch AT infinite, on the last process only."""
    if world.rank != world.size - 1:
        return
    passed = [0]

    def spoil(value: Any) -> Any:
        passed[0] += 1
        return value * float("inf") if passed[0] == AT else value

    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if special == "inf_gradient":
        next(inner.parameters()).register_hook(spoil)
    else:
        inner.register_forward_pre_hook(lambda _, x: (spoil(x[0]),))


def counted(model: nn.Module, sent: list[int]) -> None:
    """Let ddp add up the bytes that it exchanges."""

    def exchange(bucket: Any) -> Any:
        sent[0] += bucket.buffer().numel() * bucket.buffer().element_size()
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, lambda state, bucket: exchange(bucket))  # ddp takes no postponed annotations


def train(cfg: Config, special: str, world: World, prepared: PreparedDataset, folder: RunFolder) -> dict[str, Any]:
    """One case on this rank; on rank 0 its columns, full state and scores."""
    with made(special):
        return train_as_made(cfg, special, world, prepared, folder)


def train_as_made(
    cfg: Config, special: str, world: World, prepared: PreparedDataset, folder: RunFolder
) -> dict[str, Any]:
    wrap, make_scaler, update = amp_accum.wrap_model, amp_accum.make_scaler, amp_accum.update_weights
    sent, states, scalers = [0], list[Tensor](), list[GradScaler]()
    warm_up = 0  # bytes that were sent before the first step
    sent_before_meter = 0

    def wrap_otherwise(cfg: Config, model: nn.Module, run: Run) -> nn.Module:
        model = wrap(cfg, model, run)
        if special in ("count", "forward_outside"):
            counted(model, sent)
        return model

    def keep_scaler(*given: Any) -> GradScaler:
        scalers.append(make_scaler(*given))
        return scalers[-1]

    def make_meter(device: torch.device) -> MemoryMeter:
        nonlocal sent_before_meter
        sent_before_meter = warm_up
        return MemoryMeter(device)

    def look_behind(cfg: Config, model: nn.Module, *given: Any) -> bool:
        skipped = update(cfg, model, *given)
        states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return skipped

    class Planted(FullWindowsRun if special == "last_window_dropped" else Run):  # type: ignore[misc]
        def resume(self) -> int:
            nonlocal warm_up
            done = int(super().resume())
            warm_up += sent[0]
            sent[0] = 0  # what came before was no step
            if special in PLANTS:
                assert self.state is not None
                plant(special, self.state.parts[0], world)
            return done

    run = Planted(cfg, folder, Ranks(world), prepared)
    changes = {
        "wrap_model": wrap_otherwise,
        "make_scaler": keep_scaler,
        "update_weights": look_behind,
        "MemoryMeter": make_meter,
    }
    found = train_script(amp_accum, run, *((amp_accum, name, value) for name, value in changes.items()))
    sums = sums_of_ranks(found["state"])
    if not world.is_main:
        return {}
    rows = [row for row in folder.read_metrics() if "loss" in row]
    return (
        found
        | {name: [row[name] for row in rows] for name in ("skipped", "bytes_sent", "samples")}
        | {
            "losses": [float("nan") if row["loss"] is None else row["loss"] for row in rows],
            "sums": sums,
            "exchanged": sent[0],
            "sent_before_meter": sent_before_meter,
            "moved": [bool((b != a).any()) for a, b in itertools.pairwise(states)],
            "scale": scalers[-1].get_scale(),
        }
    )


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
