"""A model as pipeline stages: where it is partitioned, decided once in the life of a run, and what trains it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from common.core import config
from common.core.errors import UserError
from common.distributed.rendezvous import World
from common.measure.memory import reset_peak
from common.models import partition
from common.pipeline.executor import Loss, PipelineEngine
from common.runs import provenance
from common.runs.folder import read_json, write_atomic, write_json
from common.training.run_context import RunContext
from configs.pipeline import PipelineConfig


def split_model(cfg: PipelineConfig, model: nn.Sequential, run: RunContext) -> list[nn.Sequential]:
    """The stages of a model, partitioned as set or so that they cost about the same. All ranks call it.

    A partition that was measured goes into config.yaml. Raises UserError where the model cannot be split so.
    """
    sample = torch.randn(run.cfg.plan.microbatch, *run.sample_shape)  # to measure with
    try:
        parts = partition.split_into_stages(model, partition_points(cfg, model, sample, run))
    except ValueError as error:
        raise UserError(str(error)) from None
    empty = [part for part in parts if not any(True for _ in part.parameters())]
    if empty:
        name = next(name for name, _ in empty[0].named_children())
        raise UserError(f"split: the stage from {name} on has no parameters to train; set split, or fewer stages")
    setattr(parts[0], "recipe", getattr(model, "recipe", None))  # noqa: B010 (how to build the whole model again)
    return parts


def partition_points(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, run: RunContext) -> list[str]:
    """The layers that begin a new stage."""
    if cfg.split or cfg.stages == 1:
        return cfg.split
    if cfg.balance == "parameters":
        return partition.balance_stages(partition.count_parameters(model), cfg.stages)
    return measure_once(run, "split", lambda: cached_partition(cfg, model, sample, run))


def cached_partition(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, run: RunContext) -> list[str]:
    """The partition that was measured on machines like these for such stages before, or else now. All ranks call it.

    Each measurement comes out a little otherwise: runs that are compared must not differ in that. The file lies in
    data.cache, and removing it lets the next run measure again.
    """
    world, chosen = run.world, run.cfg
    key = {
        "model": getattr(model, "recipe", None),
        "layers": [name for name, _ in model.named_children()],
        "sample": list(sample.shape),
        "stages": cfg.stages,
        "dtype": chosen.dtype,
        "channels_last": getattr(chosen, "channels_last", False),
        "machines": sorted(
            set(world.gather((provenance.describe_machine(world.device.type), world.threads, world.size)))
        ),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = Path(chosen.data.cache) / "cuts" / f"{name}.json"
    with contextlib.ExitStack() as held:
        known = {}
        if world.is_main:
            with contextlib.suppress(OSError):  # a cache that cannot be written costs the next run some time
                file.parent.mkdir(parents=True, exist_ok=True)
                wait_for_lock(held.enter_context(open(file.with_suffix(".lock"), "w")), chosen.launch.step_timeout / 4)
            known = read_json(file)
        cut = known.get("split")
        sound = known.get("key") == json.loads(json.dumps(key)) and isinstance(cut, list)
        cut = world.broadcast(cut if sound else None)
        if cut is None:
            cut = measure_partition(cfg, model, sample, world)
            if world.is_main:
                with contextlib.suppress(OSError, UserError):
                    write_json(file, {"split": cut, "key": key})
    return [str(layer) for layer in cut]


def wait_for_lock(file: IO[str], seconds: float) -> None:
    """Wait for a run that measures the same just now, but not until the other ranks of this one time out."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.1)


def measure_partition(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, world: World) -> list[str]:
    """The partition whose slowest stage is as quick as can be.

    All ranks measure at the same time, as they will work: they share the memory's bandwidth, which layers with
    large activations need more of.
    """
    world.named_barrier("measure the cut")
    found = world.gather(partition.time_layers(model, sample.to(world.device), repeats=3))
    reset_peak(world.device)  # what follows is the training's
    sums = {name: sum(costs[name] for costs in found) for name, _ in model.named_children()}
    return partition.balance_stages(sums, cfg.stages)


def measure_once(run: RunContext, name: str, find: Callable[[], list[str]]) -> list[str]:
    """Measure a setting once per run and store it in config.yaml. All ranks call it, and `find` together.

    An attempt with other settings than those in config.yaml finds its own value, and leaves the file alone.
    """
    file, value, same = run.folder.path / "config.yaml", [], False
    if run.world.is_main:
        value = config.read_config_file(file)[name]
        setattr(run.cfg, name, value)
        same = config.to_yaml(run.cfg) == file.read_text()
    value = run.world.broadcast(value if same else [])
    value = value or run.world.broadcast(find())
    setattr(run.cfg, name, value)
    if same:
        write_atomic(file, config.to_yaml(run.cfg))
    return value


def check_devices(names: Sequence[str]) -> Sequence[str]:
    """The names, if all these devices are there. Raises UserError."""
    count = torch.cuda.device_count()
    absent = [name for name in names if name.startswith("cuda:") and int(name[5:]) >= count]
    if absent:
        raise UserError(f"devices: {absent[0]} is not there, {count} GPUs are visible; name others, or devices=[]")
    return names


def engine_class(cfg: PipelineConfig) -> type[PipelineEngine]:
    """The class that trains stages on ranks of their own."""
    if cfg.engine == "own":
        return PipelineEngine
    from common.pipeline.torch_engine import TorchPipelineEngine  # a second to import, so only when asked for

    return TorchPipelineEngine


def build_pipeline(
    cfg: PipelineConfig, stages: list[nn.Sequential], loss: Loss, run: RunContext, group: World | None = None
) -> PipelineEngine:
    """The engine that trains `stages` on the ranks of a group, or on all; each rank keeps and moves its own stages.

    `loss` is a mean over samples.
    """
    kind, shard = engine_class(cfg), run.cfg.plan.shard
    return kind(cfg, stages, loss, group or run.world, batch=shard, sample=run.sample_shape, dtype=run.dtype)
