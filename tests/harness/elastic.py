"""Run an experiment with ranks that are killed or frozen at given points.

    python -m tests.harness.elastic NAME POINT:RANK:STEP:HOW[,...] key=value ...

HOW is kill, stop, fail (an error of this rank's connections), wait (for a second), block (for ever), await-block (wait
until another rank blocks), join (until all lost ranks are back, or wait to be), or worker-kill or worker-stop, for this
rank's data workers. NAME may be followed
by one of CHANGES, as in ddp_multinode+own_state. RANK is that at the start of the run; a rank that was started again
does not fail, except at the point "arriving", before its first message to the coordinator.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler

from common.api import start
from common.checkpoint import checkpointer
from common.checkpoint.train_state import TrainState
from common.config import config
from common.data.loader import Loader
from common.measure.step_timing import StepTimer
from common.models import networks
from common.techniques.elastic import group, peer_copy
from common.techniques.elastic.recovery import ElasticRecovery
from common.training import loop
from common.training.run_context import RunContext
from tests.harness.declared import import_declared
from tests.harness.processes import wait_until

SLOW = 0.02
BLOCKED_FILE = "a-rank-blocks"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
Faults = list[tuple[str, int, int, str]]


def parse_faults(text: str) -> Faults:
    found = [one.split(":") for one in text.split(",") if one]
    return [(point, int(rank), int(step), how) for point, rank, step, how in found]


class Planted:
    """The faults of this rank, set up when its recovery begins."""

    def __init__(self, faults: Faults) -> None:
        self.faults, self.recovery = faults, None

    def reach(self, point: str, step: int) -> None:
        """Come to a point of a step, and perhaps not any further."""
        recovery: Any = self.recovery
        if recovery is None:
            return
        for at, rank, number, how in self.faults:
            if (at, rank, number) != (point, recovery.run.world.original_rank, step):
                continue
            if how == "join":
                wait_until(self.has_all, "a rank joins")
            elif recovery.spared:
                return
            elif how in SIGNALS:
                os.kill(os.getpid(), SIGNALS[how])
            elif how.startswith("worker-"):
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid or 0, SIGNALS[how.removeprefix("worker-")])
            elif how == "wait":
                time.sleep(1)
            elif how == "block":
                (recovery.run.folder.path / BLOCKED_FILE).touch()
                threading.Event().wait()
            elif how == "await-block":
                wait_until((recovery.run.folder.path / BLOCKED_FILE).exists, "another rank blocks")
            elif how == "fail":
                self.faults.remove((at, rank, number, how))
                raise RuntimeError("gloo: planted")

    def reach_in_step(self, point: str) -> None:
        """Come to a point of the step that is next."""
        if self.recovery is not None:
            self.reach(point, self.recovery.run.step + 1)

    def has_all(self) -> bool:
        run, member = self.recovery.run, self.recovery.member  # type: ignore[attr-defined]
        return bool(member.has_waiting_rank or run.world.size == run.cfg.processes)


def plant(name: str, faults: Faults) -> None:
    """Put the points into the code that this process and its ranks execute.

    An experiment adds its own points in tests/harness/NAME_points.py.
    """
    planted = Planted(faults)

    def before(owner: Any, name: str, act: Callable[..., None], after: bool = False) -> None:
        inner = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not after:
                act(*arguments)
            found = inner(*arguments, **options)
            if after:
                act(*arguments)
            return found

        setattr(owner, name, call)

    def begin(recovery: ElasticRecovery, run: RunContext, *_: Any) -> None:
        recovery.spared = run.world.is_joining  # type: ignore[attr-defined]
        planted.recovery = recovery  # type: ignore[assignment]

    def mark(_: StepTimer, name: str) -> None:
        recovery: Any = planted.recovery
        if recovery is None:
            return
        if name == "backward" and not getattr(recovery, "hooked", False):
            recovery.hooked = True  # the first layer's gradient comes last: others are on their way
            recovery.state.parameters[0][1].register_hook(lambda _: planted.reach("reduction", recovery.run.step + 1))
        if name == "end of backward":
            planted.reach("reduced", recovery.run.step + 1)

    def arrive(run: RunContext, *_: Any) -> None:
        for at, rank, _step, how in faults:
            if run.world.is_joining and (at, rank) == ("arriving", run.world.original_rank):
                os.kill(os.getpid(), SIGNALS[how])

    before(RunContext, "resume", arrive)
    before(ElasticRecovery, "__init__", begin)
    before(loop.Step, "__enter__", lambda step: planted.reach("begin", step.number))
    before(StepTimer, "record_mark", mark)
    declared = import_declared(f"tests.harness.{name}_points")
    if declared:
        declared.plant_points(before, planted.reach_in_step)
    before(ElasticRecovery, "commit", lambda self: planted.reach("committed", self.run.step + 1), after=True)
    before(loop.Step, "__exit__", lambda step, *_: planted.reach("updated", step.number))
    before(RunContext, "stop_if_requested", lambda run: planted.reach("evaluation", run.step))
    before(checkpointer, "write_rank_file", lambda *_: planted.reach("save", planted.recovery.run.step))  # type: ignore[attr-defined]
    before(group, "form_process_group", lambda member, *_: planted.reach("forming", member.generation.number))
    before(
        group.CoordinatorStore,
        "set",
        lambda store, *_: planted.reach("published", store.member.generation.number),
        after=True,
    )
    before(ElasticRecovery, "_apply_run_facts", lambda self, _: planted.reach("copied", self.member.generation.number))


def keep_own_state() -> None:
    """The mistake: each rank goes on from the weights that it has itself."""
    copy = peer_copy.broadcast_state

    def copy_all_else(state: TrainState, *arguments: Any, **options: Any) -> None:
        own = [parameter.detach().clone() for _, parameter in state.parameters]
        copy(state, *arguments, **options)
        for (_, parameter), value in zip(state.parameters, own, strict=True):
            parameter.data.copy_(value)

    peer_copy.broadcast_state = copy_all_else


def keep_old_mean() -> None:
    """The mistake: sums are divided by the samples of a mean shard at the start."""
    Loader.mean_shard = property(lambda loader: loader.size / loader.shard[1])  # type: ignore[assignment]


def keep_own_shards() -> None:
    """The mistake: each rank goes on with its own samples, and nobody takes those of the lost rank."""
    ElasticRecovery._divide_batches = lambda *_: None  # type: ignore[method-assign]


def take_time() -> None:
    """No mistake: each step takes SLOW seconds longer, so that a rank has time to come back."""
    leave = loop.Step.__exit__

    def leave_later(step: loop.Step, *error: Any) -> bool:
        time.sleep(SLOW)
        return leave(step, *error)

    loop.Step.__exit__ = leave_later  # type: ignore[method-assign]


def overflow() -> None:
    """No mistake: a scaler of the loss in float64, and gradients of rank 0 that overflow in steps 5, 6 and 14."""
    script = importlib.import_module("experiments.amp_accum")
    script.make_scaler = lambda *_: GradScaler("cpu", 1024, growth_interval=4)  # type: ignore[attr-defined]
    accumulate = script.accumulate_gradients

    def accumulate_too_much(cfg: Any, model: Any, scaler: Any, step: loop.Step, footprint: Any) -> Any:
        step.log(scale=scaler.get_scale(), counter=float(scaler._get_growth_tracker()))
        overflows = step.number in (5, 6, 14) and step.run.world.is_main
        hook = next(model.parameters()).register_hook(lambda gradient: gradient * (math.inf if overflows else 1.0))
        try:
            return accumulate(cfg, model, scaler, step, footprint)
        finally:
            hook.remove()

    script.accumulate_gradients = accumulate_too_much  # type: ignore[attr-defined]


def use_batchnorm() -> None:
    """No mistake: a small network with BatchNorm in the place of resnet18."""

    def build(shape: Sequence[int], classes: int) -> nn.Sequential:
        first = nn.Conv2d(1, 4, 5, 4, bias=False)
        return nn.Sequential(
            nn.Unflatten(1, (1, shape[0])), first, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, classes)
        )

    networks.ResNet18 = build  # type: ignore[assignment,misc]


CHANGES = {"own_state": keep_own_state, "old_mean": keep_old_mean, "own_shards": keep_own_shards}
CHANGES |= {"slow": take_time, "overflow": overflow, "batchnorm": use_batchnorm}

if __name__ == "__main__":
    (name, _, change), faults = sys.argv.pop(1).partition("+"), sys.argv.pop(1)
    if faults:
        plant(name, parse_faults(faults))
    if change:
        CHANGES[change]()
    start(importlib.import_module(f"experiments.{name}").main, config.import_schema(name))
