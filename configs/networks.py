"""Fields for networks and losses, and facts that settings are checked against without building a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.fields import custom_code

FILE_CHECKER = "common.training.custom_training:check_files_of_config"
"""Import path of the function that checks that the files of a custom network and a custom loss exist."""
TRAINING_CHECKER = "common.training.custom_training:check_training"
"""Import path of the function that checks a custom network and a custom loss on samples of the data set."""

RESNETS = {"resnet18": 11.2e6, "resnet50": 23.5e6, "resnet101": 42.5e6}  # number of parameters at width 64
MIN_IMAGE_SIZES = {"convnet": 6, "lenet5": 16}  # in pixels; convolutions without padding need larger images
TEXT_NETWORKS = ("gpt",)  # networks that require text
CONVOLUTIONS = ("convnet", "lenet5", *RESNETS)  # networks that require images
HIDDEN_MULTIPLE = 32  # the default size of a SwiGLU layer is a multiple of this number, so that ranks can divide it


def network_field(default: str, *names: str) -> Any:
    """Define a dataclass field for a network: one of the built-in networks `names`, or a custom network."""
    return custom_code(default, "model", FILE_CHECKER, choices=(*names, "FILE.py:Class"))


def loss_field() -> Any:
    """Define a dataclass field for a loss: a built-in loss or a custom loss."""
    return custom_code("cross_entropy", "loss", FILE_CHECKER, choices=("cross_entropy", "mse", "FILE.py:function"))


def get_network_name(model: str) -> str:
    """Return the name of a network for reports: the setting `model`, or the class of a custom network."""
    return model.rpartition(":")[2]


def check_samples(model: str, data_name: str) -> None:
    """Raise ValueError if a built-in network does not accept the samples of a built-in data set."""
    if model in TEXT_NETWORKS and data_name != "text":
        raise ValueError(f"model={model} needs text, but data.name={data_name} contains none; use data.name=text")
    if data_name == "text" and model not in TEXT_NETWORKS and ":" not in model:
        problem = f"data.name=text contains text, which model={model} does not accept" if model else "data.name=text"
        remedy = f"use another data set, or model={TEXT_NETWORKS[0]} in an experiment that has it"
        raise ValueError(f"{problem}; {remedy}")
    if data_name == "vectors":
        check_shape(model, data_name, (10,))


def check_shape(model: str, data_name: str, shape: Sequence[int]) -> None:
    """Raise ValueError if a built-in network does not accept samples of this shape: [H, W], [C, H, W] or [D]."""
    if ":" in model:
        return
    if not shape:
        problem = f"data.name={data_name} contains single numbers, but the model needs vectors"
        raise ValueError(f"{problem}; return inputs of shape [N, 1], or use a custom network FILE.py:Class")
    if model not in CONVOLUTIONS:
        return
    min_size = MIN_IMAGE_SIZES.get(model, 1)
    is_image = len(shape) in (2, 3)
    if not is_image or min(shape[-2:]) < min_size:
        samples = "vectors" if len(shape) == 1 else f"samples of shape {list(shape)}"
        alternatives = "model=mlp or model=toy if the experiment has it, or a custom network FILE.py:Class"
        images = f"images of at least {min_size}x{min_size} pixels" if is_image else "images"
        problem = f"data.name={data_name} contains {samples}, but model={model} needs {images}"
        raise ValueError(f"{problem}; use another data set, {alternatives}")


def choose_hidden_width(width: int, activation: str) -> int:
    """Return the default size of a feed-forward layer, so that swiglu and gelu have about as many parameters."""
    if activation == "gelu":
        return 4 * width
    return -(-8 * width // (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE
