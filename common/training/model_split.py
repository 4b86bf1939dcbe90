"""A model as pipeline stages: its partition, chosen once in the life of a run, and the engine that trains it."""

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

from common.checkpoint.train_state import get_recipe
from common.core import config
from common.core.errors import UserError
from common.distributed.rendezvous import World
from common.measure.memory import reset_peak_memory
from common.models import partition
from common.pipeline import schedules
from common.pipeline.executor import Loss, PipelineEngine
from common.runs import provenance
from common.runs.folder import read_json, write_atomic, write_json
from common.training.run_context import RunContext
from configs.pipeline import PipelineConfig


def split_model(cfg: PipelineConfig, model: nn.Sequential, run: RunContext) -> list[nn.Sequential]:
    """Partition a model into stages as `split` names them, or so that they cost about the same. All ranks call it.

    A partition that was measured goes into config.yaml. Raises UserError where the model cannot be split so.
    """
    sample = torch.randn(run.cfg.batch_plan.microbatch, *run.sample_shape)  # to measure with
    try:
        parts = partition.split_into_stages(model, choose_partition(cfg, model, sample, run))
    except ValueError as error:
        raise UserError(str(error)) from None
    empty = [part for part in parts if not any(True for _ in part.parameters())]
    if empty:
        name = next(name for name, _ in empty[0].named_children())
        raise UserError(f"split: the stage from {name} on has no parameters to train; set split, or fewer stages")
    setattr(parts[0], "recipe", get_recipe(model))  # noqa: B010 (how to build the whole model again)
    return parts


def choose_partition(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, run: RunContext) -> list[str]:
    """Return the names of the layers that begin a new stage; `sample` [N, ...] is an input of the first layer."""
    if cfg.split or cfg.stages == 1:
        return cfg.split
    if cfg.balance == "parameters":
        return partition.balance_stages(partition.count_parameters(model), cfg.stages)
    return measure_once(run, "split", lambda: find_or_measure_partition(cfg, model, sample, run))


def find_or_measure_partition(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, run: RunContext) -> list[str]:
    """Return the partition measured for such stages on machines like these, else measure it now. All ranks call it.

    Each measurement comes out a little different: runs that are compared must not differ in that. The file is in
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
            set(map(tuple, world.gather([provenance.describe_machine(world.device.type), world.threads, world.size])))
        ),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = Path(chosen.data.cache) / "cuts" / f"{name}.json"
    with contextlib.ExitStack() as held:
        cut = None
        if world.is_main:
            with contextlib.suppress(OSError):  # a cache that cannot be written costs the next run some time
                file.parent.mkdir(parents=True, exist_ok=True)
                wait_for_lock(held.enter_context(open(file.with_suffix(".lock"), "w")), chosen.launch.step_timeout / 4)
            known = read_json(file)
            if known.get("key") == json.loads(json.dumps(key)) and isinstance(known.get("split"), list):
                cut = known["split"]
        cut = world.broadcast(cut)
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
    """Measure the layers, and return the partition whose slowest stage is as fast as possible. All ranks call it.

    All measure at the same time, as they will work: they share the memory's bandwidth, which layers with large
    activations need more of. `sample` [N, ...] is an input of the first layer.
    """
    world.named_barrier("measure the partition")
    found = world.gather(partition.time_layers(model, sample.to(world.device), repeats=3))
    reset_peak_memory(world.device)  # the peak is to be that of training
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
        same = config.format_yaml(run.cfg) == file.read_text()
    value = run.world.broadcast(value if same else [])
    value = value or run.world.broadcast(find())
    setattr(run.cfg, name, value)
    if same:
        write_atomic(file, config.format_yaml(run.cfg))
    return value


def require_devices(names: Sequence[str]) -> Sequence[str]:
    """Return the names of devices. Raises UserError where one of them is not there."""
    count = torch.cuda.device_count()
    absent = [name for name in names if name.startswith("cuda:") and int(name[5:]) >= count]
    if absent:
        raise UserError(f"devices: {absent[0]} is not there, {count} GPUs are visible; name others, or devices=[]")
    return names


def build_pipeline(
    cfg: PipelineConfig, stages: list[nn.Sequential], loss: Loss, run: RunContext, group: World | None = None
) -> PipelineEngine:
    """Build the engine that trains `stages` on the ranks of a group, or on all.

    Each rank keeps its own stages and moves them to its device. `loss` is a mean over samples.
    """
    cfg = schedules.use_kept_schedule_file(cfg, run.folder.path / "code")
    kind: type[PipelineEngine] = PipelineEngine
    if cfg.engine == "torch":
        from common.pipeline.torch_engine import TorchPipelineEngine  # a second to import, so only when asked for

        kind = TorchPipelineEngine
    shard = run.cfg.batch_plan.shard
    return kind(cfg, stages, loss, group or run.world, batch=shard, sample=run.sample_shape, dtype=run.dtype)
