"""Weights and activations of linear layers in int8, by torchao."""

from __future__ import annotations

import copy
import importlib

from torch import nn

MISSING = "not measured: torchao is missing or too old; pip install --upgrade torchao"


def has_torchao() -> bool:
    """Whether torchao is there, with what is used of it. Importing it takes a second."""
    try:
        torchao = importlib.import_module("torchao.quantization")
    except ImportError:
        return False
    return hasattr(torchao, "Int8DynamicActivationInt8WeightConfig") and hasattr(torchao, "quantize_")


def quantize_to_int8(model: nn.Module) -> nn.Module:
    """A copy of a model in float32 and eval mode: weights int8, with a scale for each output; activations are rounded
    to int8 sample by sample. Convolutions, biases and norms stay as they are."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    found = copy.deepcopy(model)
    quantize_(found, Int8DynamicActivationInt8WeightConfig())
    return found
