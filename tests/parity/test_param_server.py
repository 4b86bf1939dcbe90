"""A synchronous parameter server equals DDP, and one asynchronous worker plain training, in float64, to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.runs.folder import MODEL_FILE
from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.parity.reference import TOLERANCE

SETTINGS = ("dtype=float64", "batch=24", "optim.base_batch=24", "optim.warmup=5", "steps=25", "epochs=5", "model=mlp")
REGULARIZATION = ("clip=1", "dropout=0.1")
SMALL = ("data.train_limit=120", "data.test_limit=200")


def flatten_parameters(completed: FinishedRun) -> Tensor:
    """Return all parameters of the trained model as one vector."""
    state = load_file(completed.folder.path / MODEL_FILE)
    return torch.cat([state[name].flatten() for name in sorted(state)])


def read_norms(completed: FinishedRun) -> list[float]:
    """Return the gradient norm of each step."""
    return [row["gradient_norm"] for row in completed.folder.read_metrics() if "gradient_norm" in row]


def check_equal(trained: FinishedRun, expected: FinishedRun) -> None:
    assert trained.returncode == 0, trained.stderr
    assert expected.returncode == 0, expected.stderr
    assert len(trained.losses) == 25
    assert expected.losses[-1] < 0.9 * expected.losses[0]
    assert trained.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
    norms = read_norms(trained)
    assert len(norms) == 25
    assert norms == pytest.approx(read_norms(expected), abs=TOLERANCE, rel=0)
    gaps = flatten_parameters(trained) - flatten_parameters(expected)
    assert gaps.abs().max().item() <= TOLERANCE
    assert trained.result["test_loss"] == pytest.approx(expected.result["test_loss"], abs=TOLERANCE, rel=0)
    assert trained.result["test_accuracy"] == expected.result["test_accuracy"]


def test_a_synchronous_server_equals_ddp_with_any_number_of_servers(digits: tuple[str, ...], tmp_path: Path) -> None:
    settings = (*digits, *SETTINGS, *SMALL, *REGULARIZATION, "processes_per_node=3")
    expected = run_experiment("ddp_multinode", *settings, runs=tmp_path / "ddp")
    for servers in (1, 2, 3):
        trained = run_experiment(
            "param_server", *settings, f"servers={servers}", "plot=false", runs=tmp_path / f"{servers}"
        )
        check_equal(trained, expected)
        assert trained.result["pushes"] == [75] * servers
        assert trained.result["staleness_counts"] == {"0": 75 * servers}


def test_one_asynchronous_worker_equals_plain_training(digits: tuple[str, ...], tmp_path: Path) -> None:
    settings = (*digits, *SETTINGS, *SMALL, *REGULARIZATION, "processes_per_node=1")
    expected = run_experiment("ddp_multinode", *settings, runs=tmp_path / "plain")
    for mode in ("async", "bounded"):
        trained = run_experiment("param_server", *settings, f"mode={mode}", "plot=false", runs=tmp_path / mode)
        check_equal(trained, expected)
