"""Losses other than cross-entropy: sums over parts of a batch add up, and each sample has one loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from common.system.errors import UserError
from common.training import losses

OUTPUTS = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.ones(6, 2, 3, dtype=torch.float64)


def write_loss(folder: Path, body: str) -> str:
    (folder / "custom.py").write_text(f"def f(outputs, targets):\n    return {body}\n")
    return f"{folder}/custom.py:f"


def test_the_mean_squared_error_is_that_of_torch() -> None:
    loss = losses.build_loss("mse")
    assert loss(OUTPUTS, TARGETS).item() == pytest.approx(nn.functional.mse_loss(OUTPUTS, TARGETS).item(), rel=1e-12)


@pytest.mark.parametrize("custom", [False, True], ids=["mse", "custom"])
def test_the_sums_of_unequal_parts_add_up_to_the_mean_of_the_batch(tmp_path: Path, custom: bool) -> None:
    body = "(outputs - targets).square().flatten(1).mean(1)"
    loss = losses.build_loss(write_loss(tmp_path, body) if custom else "mse")
    parts = [slice(0, 4), slice(4, 4), slice(4, 6)]  # the shard of a rank may be empty
    total = sum(loss(OUTPUTS[part], TARGETS[part], reduction="sum").item() for part in parts)
    assert total / 6 == pytest.approx(loss(OUTPUTS, TARGETS).item(), rel=1e-12)
    assert loss(OUTPUTS, TARGETS).item() == pytest.approx(nn.functional.mse_loss(OUTPUTS, TARGETS).item(), rel=1e-12)


def test_a_column_of_outputs_is_not_broadcast_against_scalar_targets() -> None:
    targets = torch.arange(3.0)
    assert losses.build_loss("mse")(targets[:, None], targets) == 0


@pytest.mark.parametrize(
    "body, problem",
    [
        ("(outputs - targets).mean()", r"returned a tensor of shape \[\] for 6 samples; return one loss per sample"),
        ("(outputs - targets).mean(2)", r"returned a tensor of shape \[6, 2\] for 6 samples"),
        ("1.0", "returned a float for 6 samples"),
    ],
)
def test_a_loss_of_another_shape_is_refused_in_every_step(tmp_path: Path, body: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        losses.build_loss(write_loss(tmp_path, body))(OUTPUTS, TARGETS)
