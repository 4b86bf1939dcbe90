"""Linear layers with int8 weights and activations, by torchao."""

from __future__ import annotations

import copy

from torch import nn

MISSING_TORCHAO = "not measured: torchao is missing or too old; pip install --upgrade torchao"


def has_torchao() -> bool:
    """Return whether a sufficiently new torchao is installed. The import takes a second."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # noqa: F401
    except ImportError:
        return False
    return True


def quantize_to_int8(model: nn.Module) -> nn.Module:
    """Return a copy of a model (float32, eval mode) with int8 linear layers, by post-training quantization.

    Weights [out, in] have one scale per output; activations are quantized dynamically, sample by sample. Convolutions,
    biases and norms stay in float32. Method: Jacob et al. 2017, arXiv 1712.05877; torchao's
    Int8DynamicActivationInt8WeightConfig.
    """
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return quantized
