"""Errors of layers that other settings avoid are shown with the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.system.errors import UserError
from common.training.model_errors import explain_layer_errors


@pytest.mark.parametrize("layer, shape", [(nn.BatchNorm1d(3), (1, 3)), (nn.BatchNorm2d(3), (1, 3, 1, 1))])
def test_a_batch_with_a_single_value_per_channel_is_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"use a larger batch \(or split_size\)"), explain_layer_errors():
        layer(torch.ones(shape))


def test_the_cause_of_an_error_of_the_pipeline_engine_of_torch_is_explained() -> None:
    with pytest.raises(UserError, match=r"use a larger batch \(or split_size\)"), explain_layer_errors():
        try:
            nn.BatchNorm1d(3)(torch.ones(1, 3))
        except ValueError as error:
            raise RuntimeError("stage 1 failed to run forward") from error


def test_other_errors_of_layers_are_unchanged() -> None:
    with pytest.raises(ValueError, match="expected 4D input"), explain_layer_errors():
        nn.BatchNorm2d(3)(torch.ones(1, 3))
