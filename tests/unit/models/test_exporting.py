"""Inputs with which an exported model is compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.models import exporting
from common.system.errors import UserError


class FloatTokens(nn.Module):
    """Network whose inputs are token numbers of the type float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.embedding(x.long()).sum(1)
        return outputs


def test_zeros_replace_inputs_that_a_model_does_not_accept() -> None:
    model = FloatTokens()
    x, outputs = exporting.compute_outputs(model, torch.tensor([[-7.0, 2.0]]))
    assert torch.equal(x, torch.zeros(1, 2))
    assert torch.equal(outputs, model(x))
    accepted = torch.ones(1, 2)
    x, outputs = exporting.compute_outputs(model, accepted)
    assert x is accepted
    assert torch.equal(outputs, model(accepted))


def test_a_model_that_accepts_no_inputs_is_refused() -> None:
    with pytest.raises(UserError, match=r"accepts neither random inputs nor zeros of shape \[1, 2\]: .*safetensors"):
        exporting.compute_outputs(nn.Linear(3, 3), torch.ones(1, 2))
