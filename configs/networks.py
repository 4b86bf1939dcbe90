"""Facts about networks that settings are checked against, without building a network."""

from __future__ import annotations

from collections.abc import Sequence

RESNETS = {"resnet18": 11.2e6, "resnet50": 23.5e6, "resnet101": 42.5e6}  # number of parameters at width 64
CONVOLUTIONS = ("convnet", "lenet5", *RESNETS)  # networks that require images


def check_shape(model: str, data_name: str, shape: Sequence[int]) -> None:
    """Raise ValueError if a network does not accept samples of this shape: [H, W], [C, H, W] or [D]."""
    if len(shape) == 1 and model in CONVOLUTIONS:
        remedy = "use another data set, or a model for vectors (model=toy, if the experiment has it)"
        raise ValueError(f"data.name={data_name} contains vectors, but the model needs images; {remedy}")
