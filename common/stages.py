"""A model as stages: where it is cut, decided once in the life of a run, and what trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common import config, report, splits
from common.config import UserError
from common.folder import write_atomic
from common.launch import World
from common.pipeline import Pipeline
from common.run import Run
from configs.pipeline import Pipeline as Settings


def choose(settings: Settings, model: nn.Sequential, sample: Tensor, run: Run) -> list[nn.Sequential]:
    """The stages of a model, cut as set or so that they cost about the same. All processes call it.

    `sample` is a microbatch, to measure with. A measured cut goes into config.yaml.
    """
    try:
        parts = splits.cut(model, where(settings, model, sample, run))
    except ValueError as error:
        raise UserError(str(error)) from None
    empty = [part for part in parts if not any(True for _ in part.parameters())]
    if empty:
        name = next(name for name, _ in empty[0].named_children())
        raise UserError(f"split: the stage from {name} on has no parameters to train; set split, or fewer stages")
    return parts


def where(settings: Settings, model: nn.Sequential, sample: Tensor, run: Run) -> list[str]:
    """The layers that begin a new stage."""
    if settings.split or settings.stages == 1:
        return settings.split
    if settings.balance == "parameters":
        return splits.balance(splits.parameter_costs(model), settings.stages)
    return settled(run, "split", lambda: measured_cut(settings, model, sample, run.world))


def measured_cut(settings: Settings, model: nn.Sequential, sample: Tensor, world: World) -> list[str]:
    """Where to cut so that the slowest stage is as quick as can be.

    All processes measure at the same time, as they will work: they share the memory's bandwidth, which layers with
    large activations need more of.
    """
    world.meet("measure the cut")
    found = world.gather(splits.time_costs(model, sample.to(world.device), repeats=3))
    report.forget_peak(world.device)  # what follows is the training's
    sums = {name: sum(costs[name] for costs in found) for name, _ in model.named_children()}
    return splits.balance(sums, settings.stages)


def settled(run: Run, name: str, find: Callable[[], list[str]]) -> list[str]:
    """What a run finds out for itself, once: it then stands in config.yaml. All processes call it, and then `find`.

    A start with other settings than those in config.yaml finds its own value, and leaves the file alone.
    """
    file, value, same = run.folder.path / "config.yaml", [], False
    if run.world.is_main:
        value = config.read_file(file)[name]
        setattr(run.settings, name, value)
        same = config.to_yaml(run.settings) == file.read_text()
    value = run.world.broadcast(value if same else [])
    value = value or run.world.broadcast(find())
    setattr(run.settings, name, value)
    if same:
        write_atomic(file, config.to_yaml(run.settings))
    return value


def checked_devices(names: Sequence[str]) -> Sequence[str]:
    """The devices, which are all there. Raises UserError."""
    count = torch.cuda.device_count()
    absent = [name for name in names if name.startswith("cuda:") and int(name[5:]) >= count]
    if absent:
        raise UserError(f"devices: {absent[0]} is not there, {count} GPUs are visible; name others, or devices=[]")
    return names


def engine(settings: Settings) -> type[Pipeline]:
    """The class that trains stages in processes of their own."""
    if settings.engine == "own":
        return Pipeline
    from common.pipeline_torch import TorchPipeline  # a second to import, so only when asked for

    return TorchPipeline
