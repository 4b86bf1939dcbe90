"""Run an experiment whose ranks are killed or stopped at given points.

    python -m tests.harness.elastic.faults NAME POINT:RANK:STEP:ACTION[,...] key=value ...

ACTION is kill, stop, fail (an error of this rank's connections), wait (for a second), block (for ever), await-block
(wait until another rank blocks), join (wait until all lost ranks are back or ask to join), or worker-kill or
worker-stop for the data workers of this rank. RANK is the rank at the start of the run. Restarted ranks have no faults,
except at the point "arriving", before their first message to the coordinator. NAME may be followed by a key of
CODE_CHANGES, as in ddp_multinode+local_weights.
"""

from __future__ import annotations

import errno
import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.amp import GradScaler

from common.api import start
from common.checkpoint import checkpointer
from common.checkpoint.saver import Saver
from common.checkpoint.train_state import TrainState
from common.config import config
from common.data.loader import Loader
from common.measure.step_timing import StepTimer
from common.models import networks
from common.techniques.elastic import group, peer_copy, recovery
from common.techniques.elastic.recovery import ElasticRecovery
from common.training import loop
from common.training.run_context import RunContext
from tests.harness.commands.processes import wait_until
from tests.harness.experiments.discovery import import_if_exists

SLOW_STEP_SECONDS = 0.02
BLOCKED_FILE = "a-rank-blocks"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    """An action of a rank at a point of a step."""

    point: str
    rank: int
    step: int
    action: str


def parse_faults(text: str) -> list[Fault]:
    faults = []
    for fault in filter(None, text.split(",")):
        point, rank, step, action = fault.split(":")
        faults.append(Fault(point, int(rank), int(step), action))
    return faults


class PlantedFaults:
    """The faults of this rank. They are active as soon as its `ElasticRecovery` exists."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        self.recovery: Any = None

    def reach_point(self, point: str, step: int) -> None:
        """Execute the actions of a point. A rank that is killed or blocks does not return."""
        if self.recovery is None:
            return
        rank = self.recovery.run.world.original_rank
        for fault in list(self.faults):
            if (fault.point, fault.rank, fault.step) != (point, rank, step):
                continue
            if self.recovery.was_restarted and fault.action != "join":
                return
            self.execute(fault)

    def execute(self, fault: Fault) -> None:
        action = fault.action
        blocked_file = self.recovery.run.folder.path / BLOCKED_FILE
        if action == "join":
            wait_until(self.has_all_ranks, "a rank joins")
        elif action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[action])
        elif action.startswith("worker-"):
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, SIGNALS[action.removeprefix("worker-")])
        elif action == "wait":
            time.sleep(1)
        elif action == "block":
            blocked_file.touch()
            threading.Event().wait()
        elif action == "await-block":
            wait_until(blocked_file.exists, "another rank blocks")
        elif action == "fail":
            self.faults.remove(fault)
            raise RuntimeError("gloo: planted")

    def reach_point_in_step(self, point: str) -> None:
        """Execute the actions of a point of the next step."""
        if self.recovery is not None:
            self.reach_point(point, self.recovery.run.step + 1)

    def has_all_ranks(self) -> bool:
        run = self.recovery.run
        return bool(self.recovery.member.has_waiting_rank or run.world.size == run.cfg.processes)


def call_before(owner: Any, name: str, callback: Callable[..., None], after: bool = False) -> None:
    """Make a function call a callback with the same arguments, before or after its own work."""
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if not after:
            callback(*arguments)
        returned = function(*arguments, **options)
        if after:
            callback(*arguments)
        return returned

    setattr(owner, name, call)


def plant_faults(name: str, faults: list[Fault]) -> None:
    """Insert the points into the code that this process and its ranks execute.

    Additional points of an experiment are in tests/harness/elastic/NAME_points.py.
    """
    planted = PlantedFaults(faults)

    def activate(recovery: ElasticRecovery, run: RunContext, *_: Any) -> None:
        recovery.was_restarted = run.world.is_joining  # type: ignore[attr-defined]
        planted.recovery = recovery

    def reach_mark(_: StepTimer, name: str) -> None:
        recovery = planted.recovery
        if recovery is None:
            return
        if name == "backward" and not getattr(recovery, "has_hook", False):
            recovery.has_hook = True
            # The gradient of the first layer is the last one, so other gradients are being reduced.
            first_parameter = recovery.state.parameters[0][1]
            first_parameter.register_hook(lambda _: planted.reach_point("reduction", recovery.run.step + 1))
        if name == "end of backward":
            planted.reach_point("reduced", recovery.run.step + 1)

    def arrive(run: RunContext, *_: Any) -> None:
        if not run.world.is_joining:
            return
        for fault in faults:
            if fault.point == "arriving" and fault.rank == run.world.original_rank:
                os.kill(os.getpid(), SIGNALS[fault.action])

    call_before(RunContext, "resume", arrive)
    call_before(ElasticRecovery, "__init__", activate)
    call_before(loop.Step, "__enter__", lambda step: planted.reach_point("begin", step.number))
    call_before(StepTimer, "record_mark", reach_mark)
    points = import_if_exists(f"tests.harness.elastic.{name}_points")
    if points:
        points.plant_points(call_before, planted.reach_point_in_step)
    call_before(ElasticRecovery, "commit", lambda self: planted.reach_point("committed", self.run.step + 1), after=True)
    call_before(loop.Step, "__exit__", lambda step, *_: planted.reach_point("updated", step.number))
    call_before(RunContext, "stop_if_requested", lambda run: planted.reach_point("evaluation", run.step))
    call_before(Saver, "save_if_best", lambda _, step, *__: planted.reach_point("evaluated", step))
    call_before(checkpointer, "write_rank_file", lambda *_: planted.reach_point("save", planted.recovery.run.step))
    call_before(
        group, "form_process_group", lambda member, *_: planted.reach_point("forming", member.generation.number)
    )
    call_before(
        group.CoordinatorStore,
        "set",
        lambda store, *_: planted.reach_point("published", store.member.generation.number),
        after=True,
    )
    call_before(
        ElasticRecovery,
        "_apply_run_facts",
        lambda self, _: planted.reach_point("copied", self.member.generation.number),
    )


def keep_local_weights() -> None:
    """Plant a mistake: each rank continues with its local weights."""
    broadcast_state = peer_copy.broadcast_state

    def broadcast_without_weights(state: TrainState, *arguments: Any, **options: Any) -> None:
        weights = [parameter.detach().clone() for _, parameter in state.parameters]
        broadcast_state(state, *arguments, **options)
        for (_, parameter), weight in zip(state.parameters, weights, strict=True):
            parameter.data.copy_(weight)

    peer_copy.broadcast_state = broadcast_without_weights


def keep_old_mean() -> None:
    """Plant a mistake: sums are divided by the mean shard size at the start of the run."""
    Loader.mean_shard = property(lambda loader: loader.size / loader.shard[1])  # type: ignore[assignment]


def keep_local_shards() -> None:
    """Plant a mistake: each rank keeps its samples, and no rank trains on the samples of a lost rank."""
    ElasticRecovery._divide_batches = lambda *_: None  # type: ignore[method-assign]


def slow_down_steps() -> None:
    """Make each step SLOW_STEP_SECONDS longer, so that a lost rank can be restarted during the run."""
    exit_step = loop.Step.__exit__

    def exit_later(step: loop.Step, *error: Any) -> bool:
        time.sleep(SLOW_STEP_SECONDS)
        return exit_step(step, *error)

    loop.Step.__exit__ = exit_later  # type: ignore[method-assign]


def force_overflows() -> None:
    """Make the gradients of rank 0 overflow in steps 5, 6 and 14, and use a loss scaler in float64."""
    script = importlib.import_module("experiments.amp_accum")
    script.make_scaler = lambda *_: GradScaler("cpu", 1024, growth_interval=4)  # type: ignore[attr-defined]
    accumulate = script.accumulate_gradients

    def accumulate_with_overflow(cfg: Any, run: Any, model: Any, scaler: Any, step: loop.Step, footprint: Any) -> Any:
        step.log(scale=scaler.get_scale(), counter=float(scaler._get_growth_tracker()))
        factor = math.inf if step.number in (5, 6, 14) and step.run.world.is_main else 1.0
        hook = next(model.parameters()).register_hook(lambda gradient: gradient * factor)
        try:
            return accumulate(cfg, run, model, scaler, step, footprint)
        finally:
            hook.remove()

    script.accumulate_gradients = accumulate_with_overflow  # type: ignore[attr-defined]


def use_batchnorm() -> None:
    """Use a small network with BatchNorm instead of resnet18."""

    def build(shape: Sequence[int], classes: int) -> nn.Sequential:
        convolution = nn.Conv2d(1, 4, 5, 4, bias=False)
        return nn.Sequential(
            nn.Unflatten(1, (1, shape[0])), convolution, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, classes)
        )

    networks.ResNet18 = build  # type: ignore[assignment,misc]


def fail_writing_rank_changes() -> None:
    """Let the disk fail when a change in the set of ranks is written to the run folder."""

    def raise_disk_error(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    recovery.write_json = raise_disk_error  # type: ignore[attr-defined,assignment]


CODE_CHANGES = {
    "local_weights": keep_local_weights,
    "old_mean": keep_old_mean,
    "local_shards": keep_local_shards,
    "slow": slow_down_steps,
    "overflow": force_overflows,
    "batchnorm": use_batchnorm,
    "disk_error": fail_writing_rank_changes,
}

if __name__ == "__main__":
    name, _, change = sys.argv.pop(1).partition("+")
    faults = parse_faults(sys.argv.pop(1))
    if faults:
        plant_faults(name, faults)
    if change:
        CODE_CHANGES[change]()
    start(importlib.import_module(f"experiments.{name}").main, config.import_schema(name))
