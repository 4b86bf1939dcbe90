"""Train many cases of amp_accum with one number of ranks in one launch, for test_amp.py and test_pitfalls_amp.py.

    python -m tests.harness.parity.amp_cases OUT_FILE CACHE RANKS key=value,key=value ...   one argument for each case

A case may begin with a special word: one of MISTAKES, which is planted in the experiment; one of PLANTS, an infinite
value on the last rank; or `count`, which counts the bytes that DDP exchanges.
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
from tests.harness.parity import reference
from tests.harness.parity.cases import prepare_for, save_cases, split_case, sums_of_ranks, train_script

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
SPOILT_MICROBATCH = 10  # the second of step 3


# ---- mistakes: each replaces a function of the experiment; its first argument is the replaced function


@contextlib.contextmanager
def multiply_losses(factor: float) -> Iterator[None]:
    """Multiply the experiment's loss by a factor."""

    def cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return factor * F.cross_entropy(logits, targets, **options)

    with unittest.mock.patch.object(amp_accum, "F", SimpleNamespace(cross_entropy=cross_entropy)):
        yield


def accumulate_sum(accumulate: Any, cfg: Config, model: nn.Module, scaler: Any, step: Any, *more_arguments: Any) -> Any:
    """Use the sum of a step's microbatches instead of the mean."""
    with multiply_losses(len(step.batch)):
        return accumulate(cfg, model, scaler, step, *more_arguments)


def accumulate_with_one_divisor(
    accumulate: Any, cfg: Config, model: nn.Module, scaler: Any, step: Any, *more_arguments: Any
) -> Any:
    """Divide every step by `cfg.accumulate`, although the last step of an epoch may have fewer microbatches."""
    with multiply_losses(len(step.batch) / cfg.accumulate):
        return accumulate(cfg, model, scaler, step, *more_arguments)


class FullWindows(Loader):
    """A loader that drops the last window of an epoch if it is not full."""

    def __iter__(self) -> Iterator[list[tuple[Any, Any]]]:
        return (window for window in super().__iter__() if len(window) == self.microbatches)


class FullWindowsRun(Run):
    def microbatches(self, count: int, **options: Any) -> Loader:
        loader = super().microbatches(count, **options)
        loader.__class__ = FullWindows
        return loader


class LateUnscaler:
    """A scaler that unscales gradients in `step`, and not in `unscale_`."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scaler, name)

    def unscale_(self, optimizer: Optimizer) -> None:
        pass


def clip_before_unscaling(update: Any, cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> Any:
    return update(cfg, model, optimizer, LateUnscaler(scaler))


def wrap_with_forwards_outside(wrap: Any, *arguments: Any) -> nn.Module:
    """Execute each forward outside no_sync, and only the backward inside."""
    model: nn.Module = wrap(*arguments)
    syncs_before_forward: list[bool] = []

    def leave_no_sync(ddp: Any, _: Any) -> None:
        syncs_before_forward.append(ddp.require_backward_grad_sync)  # no_sync sets this attribute
        ddp.require_backward_grad_sync = True

    def enter_no_sync(ddp: Any, *_: Any) -> None:
        ddp.require_backward_grad_sync = syncs_before_forward.pop()

    model.register_forward_pre_hook(leave_no_sync)
    model.register_forward_hook(enter_no_sync)
    return model


def make_scaler_for_bf16(make_scaler: Any, cfg: Config, device: torch.device) -> Any:
    if cfg.precision == "bf16":
        cfg = dataclasses.replace(cfg, precision="fp16")
    return make_scaler(cfg, device)


def make_deprecated_scaler(make_scaler: Any, cfg: Config, device: torch.device) -> Any:
    """Use the class that torch.amp.GradScaler replaces."""

    def build_deprecated(kind: str, *sizes: Any, **options: Any) -> Any:
        return torch.cuda.amp.GradScaler(*sizes, **options)

    with unittest.mock.patch.object(amp_accum, "GradScaler", build_deprecated):
        return make_scaler(cfg, device)


MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "no_divisor": ("accumulate_gradients", accumulate_sum),
    "same_divisor": ("accumulate_gradients", accumulate_with_one_divisor),
    "clip_before_unscale": ("update_weights", clip_before_unscaling),
    "forward_outside": ("wrap_model", wrap_with_forwards_outside),
    "scaler_for_bf16": ("make_scaler", make_scaler_for_bf16),
    "old_spelling": ("make_scaler", make_deprecated_scaler),
}
"""For each mistake, the name of the experiment's function and its replacement."""


@contextlib.contextmanager
def made(mistake: str) -> Iterator[None]:
    """Plant a mistake in the experiment, if `mistake` names one."""
    if mistake not in MISTAKES:
        yield
        return
    name, replacement = MISTAKES[mistake]
    replacement = functools.partial(replacement, getattr(amp_accum, name))
    with unittest.mock.patch.object(amp_accum, name, replacement):
        yield


# ---- cases


def settings(text: str) -> tuple[Config, str]:
    """Return the config of a case and its special word, or an empty string."""
    arguments = split_case(text)
    special = arguments.pop(0) if "=" not in arguments[0] else ""
    assert special in ("", "count", "last_window_dropped", *MISTAKES, *PLANTS)
    overrides = dict(argument.split("=") for argument in arguments)
    defaults = QUICK if "precision" in overrides else CASE
    return config.build_config(Config, [defaults | overrides]), special


@functools.cache
def expected(cache: Path, case: str) -> dict[str, Any]:
    """Train in one process with each window as one batch; the last batch of an epoch has only full microbatches."""
    cfg, _ = settings(case)
    prepared = prepare_for(cfg, str(cache))
    torch.manual_seed(1234)
    model = networks.SimpleNN() if cfg.model == "mlp" else networks.ConvNet((28, 28), 10)
    return reference.trained(cfg, model.double(), prepared, grain=cfg.batch // cfg.accumulate)


def plant(special: str, model: nn.Module, world: World) -> None:
    """Make the gradient or the loss of microbatch SPOILT_MICROBATCH infinite, on the last rank only."""
    if world.rank != world.size - 1:
        return
    microbatches = itertools.count(1)

    def spoil(tensor: Tensor) -> Tensor:
        return tensor * float("inf") if next(microbatches) == SPOILT_MICROBATCH else tensor

    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if special == "inf_gradient":
        next(inner.parameters()).register_hook(spoil)
    else:
        inner.register_forward_pre_hook(lambda _, x: (spoil(x[0]),))


class Recorder:
    """Replacements for functions of the experiment, which record what a case exchanges and changes."""

    def __init__(self, special: str) -> None:
        self.special = special
        self.bytes_sent = 0
        self.warm_up_bytes = 0
        """Bytes that were sent before the first step."""
        self.bytes_sent_before_meter = 0
        self.weights: list[Tensor] = []
        """The parameters after each step."""
        self.scalers: list[GradScaler] = []
        self.wrap_original = amp_accum.wrap_model
        self.make_original_scaler = amp_accum.make_scaler
        self.update_original = amp_accum.update_weights

    def wrap_model(self, cfg: Config, model: nn.Module, run: Run) -> nn.Module:
        model = self.wrap_original(cfg, model, run)
        if self.special in ("count", "forward_outside"):
            assert isinstance(model, DistributedDataParallel)
            model.register_comm_hook(
                None, lambda state, bucket: self.exchange(bucket)
            )  # DDP rejects postponed annotations
        return model

    def exchange(self, bucket: Any) -> Any:
        self.bytes_sent += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    def make_scaler(self, *arguments: Any) -> GradScaler:
        scaler: GradScaler = self.make_original_scaler(*arguments)
        self.scalers.append(scaler)
        return scaler

    def make_meter(self, device: torch.device) -> MemoryMeter:
        self.bytes_sent_before_meter = self.warm_up_bytes
        return MemoryMeter(device)

    def update_weights(self, cfg: Config, model: nn.Module, *more_arguments: Any) -> bool:
        skipped = self.update_original(cfg, model, *more_arguments)
        self.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return skipped

    def finish_warm_up(self) -> None:
        """Count only the bytes of steps from here on."""
        self.warm_up_bytes += self.bytes_sent
        self.bytes_sent = 0


def train(cfg: Config, special: str, world: World, prepared: PreparedDataset, folder: RunFolder) -> dict[str, Any]:
    """Train one case on this rank; return its metrics, full state and scores on rank 0."""
    with made(special):
        return train_and_record(cfg, special, world, prepared, folder)


def train_and_record(
    cfg: Config, special: str, world: World, prepared: PreparedDataset, folder: RunFolder
) -> dict[str, Any]:
    recorder = Recorder(special)

    class PlantedRun(FullWindowsRun if special == "last_window_dropped" else Run):  # type: ignore[misc]
        def resume(self) -> int:
            first_step = int(super().resume())
            recorder.finish_warm_up()
            if special in PLANTS:
                assert self.state is not None
                plant(special, self.state.parts[0], world)
            return first_step

    run = PlantedRun(cfg, folder, Ranks(world), prepared)
    outcome = train_script(
        amp_accum,
        run,
        (amp_accum, "wrap_model", recorder.wrap_model),
        (amp_accum, "make_scaler", recorder.make_scaler),
        (amp_accum, "update_weights", recorder.update_weights),
        (amp_accum, "MemoryMeter", recorder.make_meter),
    )
    outcome["sums"] = sums_of_ranks(outcome["state"])
    if not world.is_main:
        return {}

    rows = [row for row in folder.read_metrics() if "loss" in row]
    for name in ("skipped", "bytes_sent", "samples"):
        outcome[name] = [row[name] for row in rows]
    outcome["losses"] = [float("nan") if row["loss"] is None else row["loss"] for row in rows]
    outcome["exchanged"] = recorder.bytes_sent
    outcome["sent_before_meter"] = recorder.bytes_sent_before_meter
    outcome["moved"] = [bool((after != before).any()) for before, after in itertools.pairwise(recorder.weights)]
    outcome["scale"] = recorder.scalers[-1].get_scale()
    return outcome


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
