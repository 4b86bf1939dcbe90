"""Checks of exported models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from common.models import exporting
from slurm.reports import trained_model
from tests.harness.experiments.exported_programs import run_exported_program


class Lookup(nn.Module):
    """Network whose inputs are non-negative indices of the type float32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x.long(), torch.ones(5, 3))


@pytest.mark.parametrize(
    "model, inputs", [(Lookup(), "zeros"), (nn.Linear(2, 3), "random inputs")], ids=["zeros", "random inputs"]
)
def test_an_export_reports_if_the_model_accepts_only_zeros(
    model: nn.Module, inputs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporting, "run_exported_program_in_new_process", run_exported_program)
    facts = {"shape": [2], "dtype": "float32"}
    path = tmp_path / "model.pt2"
    assert trained_model.write_checked_export(model, facts, "torch.export", path, path) < 1e-6
    is_noted = "is checked with zeros" in capsys.readouterr().err
    assert is_noted == (inputs == "zeros")
