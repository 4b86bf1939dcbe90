"""A synchronous parameter server equals DDP, and one asynchronous worker plain training, in float64, to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.runs.folder import MODEL_FILE
from tests.harness.processes import Done, run
from tests.harness.reference import TOLERANCE

SETTINGS = ("dtype=float64", "batch=24", "optim.base_batch=24", "optim.warmup=5", "steps=25", "epochs=5", "model=mlp")
SMALL = ("data.train_limit=120", "data.test_limit=200")


def flat(done: Done) -> Tensor:
    """All parameters of the trained model."""
    return torch.cat([value.flatten() for _, value in sorted(load_file(done.folder.path / MODEL_FILE).items())])


def check_equal(found: Done, expected: Done) -> None:
    assert found.status == expected.status == 0, found.err + expected.err
    assert len(found.losses) == 25 and expected.losses[-1] < 0.9 * expected.losses[0]
    assert found.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
    assert (flat(found) - flat(expected)).abs().max().item() <= TOLERANCE
    assert found.result["test_loss"] == pytest.approx(expected.result["test_loss"], abs=TOLERANCE, rel=0)
    assert found.result["test_accuracy"] == expected.result["test_accuracy"]


def test_a_synchronous_server_equals_ddp_with_any_number_of_servers(digits: tuple[str, ...], tmp_path: Path) -> None:
    words = (*digits, *SETTINGS, *SMALL, "processes_per_node=3")
    expected = run("ddp_multinode", *words, runs=tmp_path / "ddp")
    for servers in (1, 2, 3):
        found = run("param_server", *words, f"servers={servers}", "plot=false", runs=tmp_path / f"{servers}")
        check_equal(found, expected)
        assert found.result["pushes"] == [75] * servers and found.result["staleness_counts"] == {"0": 75 * servers}


def test_one_asynchronous_worker_equals_plain_training(digits: tuple[str, ...], tmp_path: Path) -> None:
    words = (*digits, *SETTINGS, *SMALL, "processes_per_node=1")
    expected = run("ddp_multinode", *words, runs=tmp_path / "plain")
    for mode in ("async", "bounded"):
        check_equal(run("param_server", *words, f"mode={mode}", "plot=false", runs=tmp_path / mode), expected)
