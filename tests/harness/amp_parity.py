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

from common.checkpoint.train_state import TrainState
from common.core import config
from common.data import loader
from common.data.prepare import Prepared
from common.distributed.rendezvous import World
from common.measure import step_timing
from common.measure.memory import Footprint
from common.models import networks
from common.runs.folder import Folder
from common.training import optimizers
from common.training.run import Run
from configs.amp_accum import Config
from experiments import amp_accum
from tests.harness import reference
from tests.harness.cases import prepare_for, save_cases
from tests.harness.ddp_parity import whole

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
}
QUICK = CASE | {"dtype": "float32", "data.train_limit": "2000", "batch": "32", "optim.base_batch": "32"}
QUICK |= {"optim.lr": "0.1", "clip": "0.5"}
PLANTS = ("inf_gradient", "nan_loss")
AT = 10  # the microbatch that is spoilt: the second of step 3


# ---- mistakes: each is called in place of a function of the experiment, with the right one before its arguments


@contextlib.contextmanager
def losses_times(factor: float) -> Iterator[None]:
    """Let the experiment's loss be so many times as large."""

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return factor * F.cross_entropy(logits, targets)

    with unittest.mock.patch.object(amp_accum, "F", SimpleNamespace(cross_entropy=cross_entropy)):
        yield


def add_up_the_sum(right: Any, cfg: Config, model: nn.Module, scaler: Any, window: Any, *rest: Any) -> Any:
    """Not the mean over the window's microbatches."""
    with losses_times(len(window)):
        return right(cfg, model, scaler, window, *rest)


def add_up_with_one_divisor(right: Any, cfg: Config, model: nn.Module, scaler: Any, window: Any, *rest: Any) -> Any:
    """An epoch's last window may be shorter, and is divided as a full one."""
    with losses_times(len(window) / cfg.accumulate):
        return right(cfg, model, scaler, window, *rest)


def train_on_full_windows(
    right: Any, cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: Any, windows: Any, *rest: Any
) -> Any:
    full = (window for window in windows if len(window) == cfg.accumulate)
    return right(cfg, model, optimizer, scaler, full, *rest)


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
    "no_divisor": ("add_up", add_up_the_sum),
    "same_divisor": ("add_up", add_up_with_one_divisor),
    "last_window_dropped": ("train_epoch", train_on_full_windows),
    "clip_before_unscale": ("update", update_clipping_first),
    "forward_outside": ("wrap", wrap_with_forwards_outside),
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
    words = text.split(",")
    special = words.pop(0) if "=" not in words[0] else ""
    assert special in ("", "count", *MISTAKES, *PLANTS)
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
    return reference.trained(cfg, model.double(), prepared, grain=cfg.microbatch)


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


def train(cfg: Config, special: str, world: World, prepared: Prepared, folder: Folder) -> dict[str, Any]:
    """One case on this process; on rank 0 its columns, full state and scores."""
    with made(special):
        return train_as_made(cfg, special, world, prepared, folder)


def train_as_made(cfg: Config, special: str, world: World, prepared: Prepared, folder: Folder) -> dict[str, Any]:
    torch.manual_seed(1234)
    train_set, test_set = loader.load_train_test(prepared, cfg.data)
    model = amp_accum.wrap(cfg, amp_accum.build(cfg, train_set, world), world)
    optimizer = optimizers.make(model.parameters(), cfg.optim, scaled=cfg.precision == "fp16")
    scaler = amp_accum.make_scaler(cfg, world.device)
    dtype = getattr(torch, cfg.dtype)
    share = (world.rank, world.size)
    windows = loader.AccumulationLoader(
        loader.Loader(train_set, cfg.microbatch, cfg.seed, world.device, dtype, block=3, shard=share), cfg.accumulate
    )
    run = Run(cfg, folder, world, prepared)
    run.averaged, run.total = True, cfg.steps
    run.training = TrainState([model], optimizer, windows, world, replicated=True, scaler=scaler)
    sent, states = [0], []
    if special in PLANTS:
        plant(special, model, world)
    if special in ("count", "forward_outside"):
        counted(model, sent)
    step, stop, footprint, times = 0, cfg.steps, Footprint(world.device), step_timing.StepTimes(model, world.device)
    while step < cfg.steps:
        stop = step + 1 if special in PLANTS else cfg.steps  # step by step, to see what each changes
        step = amp_accum.train_epoch(cfg, model, optimizer, scaler, windows, run, footprint, times, step, stop)
        states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    run.flush()
    scores = amp_accum.evaluate(cfg, model, test_set, world)
    state = whole(model)
    equal = torch.tensor([float(sum(v.double().sum() for v in state.values()))], dtype=torch.float64)
    sums = [torch.zeros_like(equal) for _ in range(world.size)]
    dist.all_gather(sums, equal)
    if not world.is_main:
        return {}
    rows = [row for row in folder.metrics() if "loss" in row]
    return {name: [row[name] for row in rows] for name in ("skipped", "bytes_sent", "samples")} | {
        "losses": [float("nan") if row["loss"] is None else row["loss"] for row in rows],
        "state": state,
        "scores": scores,
        "sums": [float(s) for s in sums],
        "exchanged": sent[0],
        "moved": [bool((b != a).any()) for a, b in itertools.pairwise(states)],
        "scale": scaler.get_scale(),
    }


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
