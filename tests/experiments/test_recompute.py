"""The experiments recompute activations, and refuse settings and networks that do not allow it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.config import config, custom_code
from common.techniques.pipeline import schedules
from configs.pipeline import SPLIT_BACKWARD_SCHEDULES
from tests.harness.commands.processes import run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.experiments.registry import ENTRY_BY_NAME

EXPERIMENTS = ("ddp_multinode", "resnet_dataparallel", "resnet_modelparallel")
NETWORK = """
import math

from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, outputs):
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.Linear(8, outputs))
"""
SPLIT_SCHEDULE = """
def split(ranks, stages, microbatches):
    passes = [("F", 0, 0), ("I", 0, 0), ("W", 0, 0)]
    return [[(kind, rank, 0) for kind, _, _ in passes] for rank in range(ranks)]
"""
INVALID_SETTINGS = {
    "ddp_multinode recompute=blocks model=mlp": "recompute=blocks needs a network with blocks, but model=mlp has none; "
    "omit recompute, or use another network, such as model=resnet18",
    "ddp_multinode recompute=selective": "but model=convnet has none; omit recompute",
    "resnet_dataparallel recompute=blocks model=convnet": "but model=convnet has none; omit recompute",
    "resnet_dataparallel recompute=blocks model=resnet18 strategy=data_parallel": "recompute=blocks is not available "
    "with strategy=data_parallel ... use strategy=ddp or single",
    "resnet_modelparallel recompute=blocks model=toy data.name=vectors": "but model=toy has none; omit recompute",
    "resnet_modelparallel recompute=selective schedule=zero_bubble": "recompute=selective cannot be combined with "
    "schedule=zero_bubble, which splits each backward pass ... use schedule=1f1b or interleaved_1f1b",
    "resnet_modelparallel recompute=blocks schedule=zbv stages=4 stages_per_process=2": "with schedule=zbv",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused_with_the_remedy(settings: str, message: str) -> None:
    name, *arguments = settings.split()
    with expect_refusal(message):
        config.load_config(config.import_schema(name), arguments, environ={})


def test_schedules_that_split_the_backward_pass_are_known() -> None:
    splitting = []
    for name, make in schedules.SCHEDULES.items():
        stages = 4 if name in ("zbv", "dualpipev") else 2
        plan = make(2, stages, 4)
        actions = itertools.chain.from_iterable(plan)
        if "I" in {action.kind for action in actions}:
            splitting.append(name)
    assert tuple(splitting) == SPLIT_BACKWARD_SCHEDULES


def test_a_custom_schedule_that_splits_the_backward_pass_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "split.py"
    file.write_text(SPLIT_SCHEDULE)
    schema = config.import_schema("resnet_modelparallel")
    settings = [f"schedule={file}:split", "split_size=64", "batch=64"]
    custom_code.check_custom_settings(config.load_config(schema, settings, environ={}))
    cfg = config.load_config(schema, [*settings, "recompute=blocks"], environ={})
    with expect_refusal("recompute=blocks cannot be combined with schedule= ... split.py:split, which splits each"):
        custom_code.check_custom_settings(cfg)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_custom_network_without_blocks_is_refused_without_a_run_folder(
    name: str, tmp_path: Path, cache: Path
) -> None:
    """Each experiment calls `recompute_blocks`, which raises the error."""
    file = tmp_path / "net.py"
    file.write_text(NETWORK)
    data = ("data.name=digits", f"data.cache={cache}", f"model={file}:Net")
    settings = ENTRY_BY_NAME[name].smallest_settings
    completed = run_experiment(name, *settings, *data, "recompute=blocks", "steps=2", runs=tmp_path / "runs", status=2)
    assert completed.stderr.count("\n") == 1
    message = "error: recompute=blocks: the network Net has no blocks; omit recompute, add an attribute"
    assert message in completed.stderr
    assert not list((tmp_path / "runs").iterdir())
