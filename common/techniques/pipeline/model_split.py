"""Partition of a model into pipeline stages, chosen once per run, and the engine that trains the stages."""

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

from common.checkpoint.train_state import get_model_recipe
from common.config import changed_settings, config, config_keys
from common.measure.memory import reset_peak_memory
from common.ranks.rendezvous import World
from common.runs import provenance
from common.runs.folder import read_json, write_json
from common.runs.resolved_settings import record_resolved_settings, warn_of_lost_choice
from common.system.errors import UserError
from common.techniques.pipeline import partition
from common.techniques.pipeline.executor import LossFunction, PipelineEngine
from common.training.model_errors import explain_layer_errors
from common.training.run_context import RunContext
from configs.pipeline import PipelineConfig


def split_model(cfg: PipelineConfig, model: nn.Sequential, run: RunContext) -> list[nn.Sequential]:
    """Partition a model into pipeline stages, either as set by `split` or with balanced costs.

    A partition that is based on measurements is stored in resolved.yaml. All ranks must call this function. Raises
    UserError if `split` is invalid, there are more stages than layers, the model uses a layer more than once, stages
    share a parameter, or a stage has no parameters.
    """
    if len(set(model)) < len(model):
        raise UserError("the network uses a layer more than once; create a separate layer for each use")
    sample = run.load_first_inputs(run.training_cfg.batch_plan.microbatch)  # input for timing the layers
    if sample.is_floating_point():
        sample = sample.float()  # as the parameters, whose type changes later
    try:
        with explain_layer_errors():
            stages = partition.split_into_stages(model, choose_partition(cfg, model, sample, run))
    except ValueError as error:
        raise UserError(str(error)) from None
    for stage in stages:
        if not any(True for _ in stage.parameters()):
            layer = next(name for name, _ in stage.named_children())
            raise UserError(
                f"split: the stage that starts at layer {layer} has no parameters; set split to "
                "other layers or use fewer stages"
            )
    check_separate_parameters(stages)
    setattr(stages[0], "recipe", get_model_recipe(model))  # noqa: B010 (the recipe describes the whole model)
    return stages


def check_separate_parameters(stages: Sequence[nn.Module]) -> None:
    """Raise UserError if stages share a parameter, because each rank would train a copy of it."""
    parameters_of_earlier_stages: set[nn.Parameter] = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter in parameters_of_earlier_stages:
                raise UserError(
                    f"layers of different stages share the parameter {name}; set split so that these layers are in one "
                    "stage, or create separate parameters"
                )
        parameters_of_earlier_stages.update(stage.parameters())


def choose_partition(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, run: RunContext) -> list[str]:
    """Return the names of the layers at which a new stage starts.

    `sample` [N, ...] is an input batch of the first layer.
    """
    if cfg.split or cfg.stages == 1:
        return cfg.split
    if cfg.balance == "parameters":
        return partition.balance_stages(partition.count_parameters(model), cfg.stages)
    return load_or_measure_split(run, lambda: find_or_measure_partition(cfg, model, sample, run))


def find_or_measure_partition(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, run: RunContext) -> list[str]:
    """Return the cached partition for this model and these machines, or measure a partition and cache it.

    Because measurements vary slightly, the cache ensures that runs which are compared with each other use the same
    partition. To repeat the measurement, delete the cache file in the subfolder `cuts` of the folder data.cache. All
    ranks must call this function.
    """
    world = run.world
    machine = provenance.describe_machine(world.device.type)
    machines = {tuple(facts) for facts in world.gather([machine, world.threads, world.size])}
    key = {
        "model": getattr(model, "recipe", None),
        "layers": [name for name, _ in model.named_children()],
        "sample": list(sample.shape),
        "stages": cfg.stages,
        "dtype": run.training_cfg.dtype,
        "channels_last": getattr(run.cfg, "channels_last", False),
        "machines": sorted(machines),
    }
    text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = Path(run.training_cfg.data.cache) / "cuts" / f"{digest}.json"
    with contextlib.ExitStack() as stack:
        split = None
        if world.is_main:
            with contextlib.suppress(OSError):  # if the cache is not writable, the next run measures again
                file.parent.mkdir(parents=True, exist_ok=True)
                lock_file = stack.enter_context(open(file.with_suffix(".lock"), "w"))
                wait_for_lock(lock_file, run.cfg.launch.step_timeout / 4)
            cached = read_json(file)
            if cached.get("key") == json.loads(text) and isinstance(cached.get("split"), list):
                split = cached["split"]
        split = world.broadcast(split)
        if split is None:
            split = measure_partition(cfg, model, sample, world)
            if world.is_main:
                with contextlib.suppress(OSError, UserError):
                    write_json(file, {"split": split, "key": key})
    return [str(layer) for layer in split]


def wait_for_lock(file: IO[str], seconds: float) -> None:
    """Wait until no other run measures the same partition, for at most `seconds`.

    `seconds` must be shorter than the timeout of the other ranks, which wait for this rank.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.1)


def measure_partition(cfg: PipelineConfig, model: nn.Sequential, sample: Tensor, world: World) -> list[str]:
    """Time each layer, and return the partition that minimizes the time of the slowest stage.

    All ranks must call this function and measure at the same time, because ranks also compete for memory bandwidth
    during training. This competition slows down layers with large activations the most. `sample` [N, ...] is an input
    batch of the first layer.
    """
    world.wait_for_all_ranks("measure the partition")
    costs = world.gather(partition.time_layers(model, sample.to(world.device), repeats=3))
    reset_peak_memory(world.device)  # exclude this measurement from the reported peak memory
    sums = dict.fromkeys(dict(model.named_children()), 0.0)
    for rank_costs in costs:
        for layer in sums:
            sums[layer] += rank_costs[layer]
    return partition.balance_stages(sums, cfg.stages)


def load_or_measure_split(run: RunContext, measure: Callable[[], list[str]]) -> list[str]:
    """Return the split that an earlier attempt has measured, or measure the split and store it in resolved.yaml.

    All ranks must call this function, and all ranks call `measure` at the same time. An attempt with another
    `split`, or with other settings on which the split depends, measures its own split, which is not stored.
    """
    stored: list[str] = []
    is_unchanged = False
    if run.world.is_main:
        changes = changed_settings.read_changes(run.folder.attempt_folder / changed_settings.CHANGES_FILE)
        split_key = config_keys.list_keys(type(run.cfg))["split"]
        is_unchanged = changes.keys().isdisjoint(("split", *split_key.chosen_from))
        stored = config.read_settings(run.folder.path)["split"] if is_unchanged else []
    stored = run.world.broadcast(stored)
    if stored:
        return stored
    split = run.world.broadcast(measure())
    if is_unchanged:
        warn_of_lost_choice(run.folder.path, "split")
        record_resolved_settings(run.folder.path, {"split": split})
    return split


def check_devices_exist(names: Sequence[str]) -> Sequence[str]:
    """Return the device names unchanged. Raises UserError if one of the devices does not exist."""
    count = torch.cuda.device_count()
    missing = [name for name in names if name.startswith("cuda:") and int(name[5:]) >= count]
    if missing:
        problem = f"{missing[0]} does not exist (number of visible GPUs: {count})"
        raise UserError(f"devices: {problem}; use other devices, or set devices=[]")
    return names


def build_pipeline_engine(
    cfg: PipelineConfig, stages: list[nn.Sequential], loss: LossFunction, run: RunContext, group: World | None = None
) -> PipelineEngine:
    """Build the engine that trains `stages` on the ranks of `group`, or on all ranks if `group` is None.

    Each rank keeps only its own stages and moves them to its device. `loss` must be a mean over samples.
    """
    engine_class: type[PipelineEngine] = PipelineEngine
    if cfg.engine == "torch":
        from common.techniques.pipeline.torch_engine import TorchPipelineEngine  # this import takes a second

        engine_class = TorchPipelineEngine
    world = group or run.world
    shard = run.training_cfg.batch_plan.shard
    engine = engine_class(cfg, stages, loss, world, batch=shard, sample=run.load_first_inputs(1).cpu(), dtype=run.dtype)
    run.set_up_step_meter(None, engine.shared_memory_bytes)
    return engine
