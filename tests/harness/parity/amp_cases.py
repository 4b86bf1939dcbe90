"""Method of amp_accum, its mistakes, and infinite values on one rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.data.loader import Loader
from common.measure.memory import MemoryMeter
from common.models import networks
from common.training.loop import Step
from common.training.run import Run
from configs.amp_accum import Config
from experiments import amp_accum
from tests.harness.parity.method import Outcome, ParityMethod, Replacement, change_result, replace_attributes

SETTINGS = (
    "data.name=digits",
    "data.train_limit=500",  # 83 microbatches of 6: twenty windows of 4 in an epoch, and one of 3
    "data.test_limit=101",
    "model=mlp",
    "precision=fp32",
    "batch=24",
    "eval_batch=16",
    "optim.lr=0.05",
    "optim.base_batch=24",
    "optim.warmup=5",
    "optim.decay=cosine",
    "clip=2",
    "epochs=2",
    "steps=30",
    "seed=7",
    "data.block=3",
)
PRECISION_SETTINGS = (
    "dtype=float32",
    "data.train_limit=2000",
    "batch=32",
    "optim.base_batch=32",
    "optim.lr=0.1",
    "clip=0.5",
)
"""Further settings of cases with a precision."""
SPOILT_MICROBATCH = 10  # the second of step 3


# ---- mistakes: each function gets the function that it replaces as first argument


def multiply_losses(run: Any, factor: float) -> Any:
    """Return an object whose loss is the loss of a run times a factor."""
    return SimpleNamespace(loss=lambda *arguments, **options: factor * run.loss(*arguments, **options))


def accumulate_sum(
    accumulate: Any, cfg: Config, run: Any, model: nn.Module, scaler: Any, step: Any, *more_arguments: Any
) -> Any:
    """Use the sum of a step's microbatches instead of the mean."""
    return accumulate(cfg, multiply_losses(run, len(step.batch)), model, scaler, step, *more_arguments)


def accumulate_with_one_divisor(
    accumulate: Any, cfg: Config, run: Any, model: nn.Module, scaler: Any, step: Any, *more_arguments: Any
) -> Any:
    """Divide every step by `cfg.accumulate`, although the last step of an epoch may have fewer microbatches."""
    factor = len(step.batch) / cfg.accumulate
    return accumulate(cfg, multiply_losses(run, factor), model, scaler, step, *more_arguments)


class FullWindows(Loader):
    """A loader that drops the last window of an epoch if it is not full."""

    def __iter__(self) -> Iterator[list[tuple[Any, Any]]]:
        return (window for window in super().__iter__() if len(window) == self.microbatches)


def drop_last_window(microbatches: Any, run: Run, *arguments: Any, **options: Any) -> Loader:
    loader: Loader = microbatches(run, *arguments, **options)
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


def clip_before_unscaling(
    update: Any, cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, step: Step
) -> Any:
    return update(cfg, model, optimizer, LateUnscaler(scaler), step)


def leave_forwards_outside(model: nn.Module) -> None:
    """Execute each forward outside no_sync, and only the backward inside."""
    syncs_before_forward: list[bool] = []

    def leave_no_sync(ddp: Any, _: Any) -> None:
        syncs_before_forward.append(ddp.require_backward_grad_sync)  # no_sync sets this attribute
        ddp.require_backward_grad_sync = True

    def enter_no_sync(ddp: Any, *_: Any) -> None:
        ddp.require_backward_grad_sync = syncs_before_forward.pop()

    model.register_forward_pre_hook(leave_no_sync)
    model.register_forward_hook(enter_no_sync)


def make_scaler_for_bf16(make_scaler: Any, cfg: Config, device: torch.device) -> Any:
    if cfg.precision == "bf16":
        cfg = dataclasses.replace(cfg, precision="fp16")
    return make_scaler(cfg, device)


def make_deprecated_scaler(make_scaler: Any, cfg: Config, device: torch.device) -> Any:
    """Use the class that torch.amp.GradScaler replaces."""

    def build_deprecated(_: Any, kind: str, *sizes: Any, **options: Any) -> Any:
        return torch.cuda.amp.GradScaler(*sizes, **options)

    with replace_attributes((amp_accum, "GradScaler", build_deprecated)):
        return make_scaler(cfg, device)


# ---- infinite values on the last rank only


def spoil_microbatch() -> Callable[[Tensor], Tensor]:
    """Return a function that makes the tensor of its call number SPOILT_MICROBATCH infinite."""
    microbatches = itertools.count(1)

    def spoil(tensor: Tensor) -> Tensor:
        if next(microbatches) == SPOILT_MICROBATCH:
            return tensor * float("inf")
        return tensor

    return spoil


def plant_infinite_gradient(resume: Callable[[Run], int], run: Run) -> int:
    first_step = resume(run)
    assert run.state is not None
    if run.world.rank == run.world.size - 1:
        parameter = next(run.state.parts[0].parameters())
        parameter.register_hook(spoil_microbatch())
    return first_step


def plant_infinite_loss(resume: Callable[[Run], int], run: Run) -> int:
    first_step = resume(run)
    assert run.state is not None
    if run.world.rank == run.world.size - 1:
        spoil = spoil_microbatch()
        run.state.parts[0].register_forward_pre_hook(lambda _, inputs: (spoil(inputs[0]),))
    return first_step


# ---- training


class Recorder:
    """Replacements for functions of the experiment, which record what a case exchanges and changes."""

    counts_exchanges = False
    """Whether the bytes that DDP exchanges are counted."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.warm_up_bytes = 0
        """Bytes that were sent before the memory meter was created, and so before the first step."""
        self.weights: list[Tensor] = []
        """The parameters after each step."""
        self.scale = 0.0

    def wrap_model(self, wrap: Any, cfg: Config, model: nn.Module, run: Run) -> nn.Module:
        replica: nn.Module = wrap(cfg, model, run)
        if self.counts_exchanges:
            assert isinstance(replica, DistributedDataParallel)
            # a lambda, because DDP rejects postponed annotations
            replica.register_comm_hook(None, lambda _, bucket: self.exchange(bucket))
        return replica

    def exchange(self, bucket: Any) -> Any:
        self.bytes_sent += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    def make_meter(self, meter_class: type[MemoryMeter], device: torch.device) -> MemoryMeter:
        """Count only the bytes of steps from here on."""
        self.warm_up_bytes = self.bytes_sent
        self.bytes_sent = 0
        return meter_class(device)

    def update_weights(
        self, update: Any, cfg: Config, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, step: Step
    ) -> bool:
        skipped: bool = update(cfg, model, optimizer, scaler, step)
        parameters = [p.detach().flatten() for p in model.parameters()]
        self.weights.append(torch.cat(parameters))
        self.scale = scaler.get_scale()
        return skipped


def build_model(cfg: Config) -> nn.Module:
    model = networks.SimpleNN() if cfg.model == "mlp" else networks.ConvNet((28, 28), 10)
    return model.double()


def train(cfg: Config, run: Run) -> Outcome:
    """Train, and return the exchanged bytes, the scale, and whether each step after the first changed parameters."""
    recorder = Recorder()
    replacements = [
        (amp_accum, "wrap_model", recorder.wrap_model),
        (amp_accum, "update_weights", recorder.update_weights),
        (amp_accum, "MemoryMeter", recorder.make_meter),
    ]
    with replace_attributes(*replacements):
        amp_accum.main(cfg, run)
    outcome: Outcome = {"exchanged": recorder.bytes_sent, "sent_before_meter": recorder.warm_up_bytes}
    pairs = itertools.pairwise(recorder.weights)
    outcome["moved"] = [not torch.equal(previous, weights) for previous, weights in pairs]
    outcome["scale"] = recorder.scale
    return outcome


MISTAKES: dict[str, list[Replacement]] = {
    "no_divisor": [(amp_accum, "accumulate_gradients", accumulate_sum)],
    "same_divisor": [(amp_accum, "accumulate_gradients", accumulate_with_one_divisor)],
    "last_window_dropped": [(Run, "microbatches", drop_last_window)],
    "clip_before_unscale": [(amp_accum, "update_weights", clip_before_unscaling)],
    "forward_outside": [
        change_result(amp_accum, "wrap_model", leave_forwards_outside),
        (Recorder, "counts_exchanges", True),
    ],
    "scaler_for_bf16": [(amp_accum, "make_scaler", make_scaler_for_bf16)],
    "old_spelling": [(amp_accum, "make_scaler", make_deprecated_scaler)],
}
INFINITE_VALUES: dict[str, list[Replacement]] = {
    "inf_gradient": [(Run, "resume", plant_infinite_gradient)],
    "nan_loss": [(Run, "resume", plant_infinite_loss)],
}
AMP = ParityMethod(
    name="amp_cases:AMP",
    schema=Config,
    settings=SETTINGS,
    presets={f"precision={precision}": PRECISION_SETTINGS for precision in ("fp32", "bf16", "fp16")},
    train=train,
    build_model=build_model,
    changes={**MISTAKES, **INFINITE_VALUES, "count": [(Recorder, "counts_exchanges", True)]},
)
