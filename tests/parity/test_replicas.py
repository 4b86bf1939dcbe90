"""Replicas of a pipeline equal the unsplit model, in float64, to 1e-9."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import config
from common.data import prepare
from common.models.networks import ResNet
from common.models.sample_dropout import add_dropout
from common.system import seeds
from configs.resnet_modelparallel import Config
from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.parity.reference import list_differences, train_reference

STEPS = 10
PARITY = (
    "data.name=generated",
    "data.samples=50",  # six steps an epoch, two samples left out
    "data.image_size=16",
    "width=8",
    "batch=8",
    "split_size=2",
    f"steps={STEPS}",
    "epochs=2",
    "dtype=float64",
    "eval_batch=4",
    "plot=false",
    "log.gradient_norm=true",
    "launch.threads=1",
    "clip=1",
    "dropout=0.1",
)
STAGES = ("replicas=2", "stages=2", "split=[layer3_0]", "checkpoint.every_seconds=0")


@functools.cache
def train_two_shards(cache: Path) -> dict[str, Any]:
    """Train two shards of each batch in microbatches; each shard has its own BatchNorm buffers.

    The buffers are averaged for the evaluation after each epoch, and training continues with the means.
    """
    cfg = config.load_config(Config, [*PARITY, f"data.cache={cache}", "mode=single"], {})
    torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
    model = ResNet("resnet18", (3, cfg.data.image_size, cfg.data.image_size), 10, width=cfg.width)
    add_dropout(model, cfg.regularization.dropout, cfg.seed).double()
    prepared = prepare.prepare_dataset(cfg.data)
    return train_reference(cfg, model, prepared, (4, 4))


def read_outcome(completed: FinishedRun) -> dict[str, Any]:
    """Return losses, the state that all ranks saved in the last step, and scores."""
    assert completed.returncode == 0, completed.stderr + completed.stdout
    *_, folder = sorted((completed.folder.list_attempts()[0].attempt_folder / "checkpoints").glob("step-*"))
    assert folder.name == f"step-{len(completed.losses):08d}"
    state: dict[str, Any] = {}
    for file in sorted(folder.glob("rank-*.pt")):
        state |= torch.load(file, weights_only=True)["model"]
    names = ("test_loss", "test_accuracy", "test_samples")
    outcome = {"losses": completed.losses, "state": state, "scores": {name: completed.result[name] for name in names}}
    rows = completed.folder.read_metrics()
    return outcome | {"norms": [row["gradient_norm"] for row in rows if "gradient_norm" in row]}


@pytest.mark.parametrize(
    "settings",
    [
        ("mode=pipelined", "schedule=1f1b"),
        ("mode=pipelined", "schedule=gpipe", "launch.nodes=2"),
        ("mode=pipelined", "engine=torch", "schedule=gpipe"),
        ("mode=naive", "transport=network", "zero1=true"),
    ],
    ids=" ".join,
)
def test_two_replicas_of_two_stages_equal_one_process(settings: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    common = (*PARITY, *STAGES, f"checkpoint.every_steps={STEPS}", f"data.cache={cache}")
    completed = run_experiment("resnet_modelparallel", *common, *settings, runs=tmp_path, timeout=250)
    outcome = read_outcome(completed)
    assert len(outcome["norms"]) == STEPS
    assert list_differences(outcome, train_two_shards(cache)) == []
    assert len(list(completed.folder.list_attempts()[0].attempt_folder.glob("heartbeat-*.json"))) == 4
