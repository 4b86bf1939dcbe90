"""Runs with custom networks, losses and data sets reproduce other runs: built-in layers, one process, a resumed run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import FinishedRun, execute_verb, run_experiment
from tests.harness.custom_code.examples import write_example
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.resuming import resume_run

NAME = REPLICATED_ENTRY.name
QUIET = ("log.progress=none", "launch.threads=1", "batch=16", "optim.base_batch=16", "optim.warmup=0", "steps=25")
MLP = """from torch import nn

print("loaded", __file__)


class Mlp(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.fc1 = nn.Linear(shape[0] * shape[1], 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, outputs)

    def forward(self, x):
        x = self.fc1(x.flatten(1)).relu()
        return self.fc3(self.fc2(x).relu())
"""
FROZEN_AND_TIED = """from torch import nn


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.frozen = nn.Linear(shape[0], 32).requires_grad_(False)
        self.tied1 = nn.Linear(32, 32)
        self.tied2 = nn.Linear(32, 32)
        self.tied2.weight = self.tied1.weight
        self.last = nn.Linear(32, outputs)

    def forward(self, x):
        return self.last(self.tied2(self.tied1(self.frozen(x).relu()).relu()).relu())
"""
HUBER = """import torch.nn.functional as F


def huber(outputs, targets):
    return F.huber_loss(outputs.squeeze(1), targets, reduction="none")
"""


def test_a_custom_network_equals_the_built_in_one_bit_for_bit_and_is_read_from_the_run(
    tmp_path: Path, cache: Path
) -> None:
    file = tmp_path / "mlp.py"
    file.write_text(MLP)
    data = ("data.name=digits", f"data.cache={cache}", "data.test_limit=200")
    builtin = run_experiment(NAME, *QUIET, *data, "model=mlp", runs=tmp_path / "builtin")
    custom = run_experiment(NAME, *QUIET, *data, f"model={file}:Mlp", runs=tmp_path / "custom")
    assert custom.losses == builtin.losses
    assert custom.result["test_loss"] == builtin.result["test_loss"]
    assert custom.result["test_accuracy"] == builtin.result["test_accuracy"]
    (copy,) = (custom.folder.path / "code/own").iterdir()
    _, _, rank_output = custom.stdout.partition("run folder ")
    assert f"loaded {copy}\n" in rank_output
    assert f"loaded {file}\n" not in rank_output, "the copy exists before the ranks start"

    file.unlink()
    moved = tmp_path / "moved" / custom.folder.path.name
    shutil.move(custom.folder.path, moved)  # the model does not depend on the path of its run
    folder = str(moved)
    evaluation = execute_verb("evaluate", "--", folder, status=0)
    assert "Mlp, " in evaluation.stdout
    assert "relative difference: 0\n" in evaluation.stdout
    export = execute_verb("export", "--format=torch.export", "--", folder, status=0)
    assert "model.pt2\nchecked: the outputs of the exported model differ" in export.stdout
    moved_copy = moved / "code/own" / copy.name
    moved_copy.unlink()
    refusal = in_process_calls.call_verb("evaluate", "--", folder, status=2)
    assert f"{moved_copy} is missing; restore this file, which defines the network Mlp" in refusal.stderr


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of a regression in float64, and a file with a custom loss."""
    folder = tmp_path_factory.mktemp("waves")
    (folder / "huber.py").write_text(HUBER)
    file = write_example(folder, "waves.py")
    data = (f"data.name={file}:load", f"data.cache={folder / 'sets'}", "data.train_limit=400")
    return (*QUIET, *data, "model=mlp", "dtype=float64", f"loss={folder / 'huber.py'}:huber")


def train_regression(waves: tuple[str, ...], folder: Path, *settings: str) -> FinishedRun:
    return run_experiment(NAME, *waves, *settings, runs=folder)


@pytest.mark.parametrize("settings", [("loss=mse",), ("shards=[3,1]",)], ids=["mse", "custom loss, unequal shards"])
def test_a_regression_on_two_ranks_equals_one_process(
    tmp_path: Path, waves: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    single_settings = [setting for setting in settings if not setting.startswith("shards")]
    single = train_regression(waves, tmp_path / "single", "processes_per_node=1", *single_settings)
    double = train_regression(waves, tmp_path / "double", "processes_per_node=2", *settings)
    assert len(single.losses) == 25
    assert double.losses == pytest.approx(single.losses, rel=1e-9)
    assert double.result["test_loss"] == pytest.approx(single.result["test_loss"], rel=1e-9)
    assert "test_accuracy" not in double.result
    assert single.losses[-1] < single.losses[0]
    assert "test accuracy" not in single.stdout
    assert "test loss" in single.stdout
    evaluation = in_process_calls.call_verb("evaluate", "--", str(double.folder.path))
    assert "correct" not in evaluation.stdout
    assert "recorded by the run" in evaluation.stdout


def test_frozen_and_shared_parameters_train_and_resume_as_in_one_process(
    tmp_path: Path, waves: tuple[str, ...]
) -> None:
    (tmp_path / "net.py").write_text(FROZEN_AND_TIED)
    settings = (f"model={tmp_path / 'net.py'}:Net", "clip=0.1", "log.gradient_norm=true", "optim.decay=constant")
    single = train_regression(waves, tmp_path / "single", "processes_per_node=1", *settings)
    sharded = train_regression(waves, tmp_path / "sharded", "strategy=fsdp", *settings, "steps=15")
    initial = load_file(single.folder.path / "model.safetensors")
    resume_run(REPLICATED_ENTRY, sharded.folder, "steps=25")
    losses = [row["loss"] for row in sharded.folder.read_metrics() if "loss" in row]
    assert losses == pytest.approx(single.losses, rel=1e-9)
    trained = load_file(sharded.folder.path / "model.safetensors")
    assert trained.keys() == initial.keys()
    assert torch.equal(trained["frozen.weight"], initial["frozen.weight"])
    assert torch.allclose(trained["tied1.weight"], initial["tied1.weight"], rtol=1e-9)
