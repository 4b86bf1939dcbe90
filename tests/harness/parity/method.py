"""Declaration of an experiment for parity tests, and the reference run of its cases.

A case is a text of settings, such as "stages=2,schedule=1f1b". Its first word may name a change of the training, such
as a mistake that the tests must detect: "lose_relu,stages=2".
"""

from __future__ import annotations

import contextlib
import functools
import re
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.config import config
from common.data import prepare
from common.training.run import Run
from tests.harness.parity import reference

SEED = 1234
"""Seed of torch's generator before a model is built, in all ranks and in the reference run."""
COMMON_SETTINGS = ("dtype=float64", "launch.threads=1", "checkpoint.every_seconds=0")
Replacement = tuple[Any, str, Any]
"""Owner and name of an attribute, and what replaces it. A function gets the replaced function as first argument."""
Outcome = dict[str, Any]
"""Results of a training: `losses` of all steps, full `state` of the model, `scores`, and further results by name."""


@dataclass(frozen=True, eq=False)
class ParityMethod:
    """How the cases of an experiment are trained."""

    name: str
    """`MODULE:ATTRIBUTE` of this declaration; the module belongs to tests.harness.parity."""
    schema: type[Any]
    """Class of the experiment's config."""
    train: Callable[[Any, Run], Outcome | None]
    """Trains on each rank with the experiment's `main`, and may return further results. Gets the config and the run."""
    settings: tuple[str, ...]
    """Settings of all cases, in addition to COMMON_SETTINGS."""
    presets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further settings of the cases that contain a setting, such as "model=resnet18"."""
    ranks_setting: str = "processes_per_node"
    """Setting for the number of ranks; empty if other settings of a case determine this number."""
    replacements: Sequence[Replacement] = ()
    """What all cases replace in the experiment, for example to train a smaller model."""
    changes: Mapping[str, Sequence[Replacement]] = field(default_factory=dict)
    """What the first word of a case replaces in addition, by word."""
    build_model: Callable[[Any], nn.Module] | None = None
    """Builds the unsplit model of the reference run in float64 from a config; None if no test needs this run."""
    train_reference: Callable[..., Outcome] = reference.train_reference
    """Trains the unsplit model in one process. Gets config, model, data and the sizes of shards."""

    def split_case(self, case: str) -> tuple[str, list[str]]:
        """Return the first word of a case, or an empty string, and its settings."""
        settings = re.split(r",(?![^\[]*\])", case)  # not at commas inside the brackets of a list
        word = "" if "=" in settings[0] else settings.pop(0)
        assert not word or word in self.changes, f"{self.name} has no change {word}"
        return word, settings

    def build_config(self, case: str, cache: Path, ranks: int) -> Any:
        """Return the config of a case."""
        _, settings = self.split_case(case)
        default_settings = [*COMMON_SETTINGS, *self.settings, f"data.cache={cache}"]
        for setting in settings:
            default_settings += self.presets.get(setting, ())
        if self.ranks_setting:
            default_settings.append(f"{self.ranks_setting}={ranks}")

        values = {}  # later settings replace earlier ones
        for setting in [*default_settings, *settings]:
            key, _, value = setting.partition("=")
            values[key] = value
        return config.build_config(self.schema, [values])


@functools.cache
def run_reference(method: ParityMethod, cache: Path, case: str, shard_sizes: tuple[int, ...] = ()) -> Outcome:
    """Train the unsplit model of a case in this process, with one or several shards of each batch."""
    assert method.build_model is not None
    cfg = method.build_config(case, cache, ranks=1)
    prepared = prepare.prepare_dataset(cfg.data)
    torch.manual_seed(SEED)
    model = method.build_model(cfg)
    return method.train_reference(cfg, model, prepared, shard_sizes)


@contextlib.contextmanager
def replace_attributes(*replacements: Replacement) -> Iterator[None]:
    """Replace attributes in the `with` block, one after another. Several can replace the same attribute."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            new_value = replacement
            if callable(replacement):
                new_value = pass_original(replacement, getattr(owner, name))
            stack.enter_context(unittest.mock.patch.object(owner, name, new_value))
        yield


def pass_original(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Return a function, also usable as a method, that passes `original` as first argument."""

    def call(*arguments: Any, **options: Any) -> Any:
        return function(original, *arguments, **options)

    return call


def change_result(owner: Any, name: str, change: Callable[[Any], None]) -> Replacement:
    """Return a replacement of a function that calls `change` with what the function returns."""

    def call_and_change(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        change(result)
        return result

    return owner, name, call_and_change


def collect_state(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers of this rank's parts of a model, sharded ones gathered. All ranks call it."""
    state = {}
    for part in parts:
        for name, tensor in part.state_dict().items():
            state[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return state
