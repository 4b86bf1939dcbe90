"""Quantization of linear layers to int8 weights and activations, with torchao."""

from __future__ import annotations

import copy

from torch import nn

MISSING_TORCHAO = "not measured: torchao is missing or too old; run pip install --upgrade torchao"


def has_torchao() -> bool:
    """Return whether a recent enough torchao is installed. This function imports torchao, which takes a second."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # noqa: F401
    except ImportError:
        return False
    return True


def quantize_to_int8(model: nn.Module) -> nn.Module:
    """Return a copy of a model with int8 linear layers, made by post-training quantization.

    The model must be in float32 and in eval mode. Weights [out, in] have one scale per output. Activations are
    quantized dynamically, with one scale per sample. Convolutions, biases, and normalization layers stay in float32.
    The method was described by Jacob et al. 2017 (arXiv 1712.05877) and is implemented by torchao's
    Int8DynamicActivationInt8WeightConfig.
    """
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return quantized
