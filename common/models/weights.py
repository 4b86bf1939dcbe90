"""Loading of weights into a network: from a run, a checkpoint folder, a safetensors file or a file of torch.save."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint import rank_file, storage
from common.checkpoint.state_dicts import strip_wrapper_prefix
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint
from common.models.initial_weights import find_initial_weights
from common.models.model_file import build_model, read_model, read_safetensors
from common.models.networks import MIN_IMAGENET_PIXELS, ResNet18, list_saved_tensors
from common.runs.folder import RunFolder
from common.system.errors import UserError

SIZE_REMEDY = (
    f"the first convolution of a ResNet is 7x7 for images of at least {MIN_IMAGENET_PIXELS} pixels, and 3x3 for "
    "smaller images; change data.image_size"
)
RESNET18_REMEDY = (
    "in this experiment, the first convolution of resnet18 is always 3x3; "
    "use model=resnet50, or an experiment whose resnet18 adapts to the size of the images"
)
OTHER_REMEDY = "use the sizes of the model in the file, such as its width and its numbers of classes and color channels"


def load_weights_of_setting(model: nn.Module, weights: str, runs: Path) -> None:
    """Load the weights that the setting `weights` refers to into a model.

    Raises UserError if the weights are invalid or do not match.
    """
    load_weights(model, read_weights(weights, runs), weights)


def convert_parameter_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with tensors renamed as in the networks of common/models/networks.py.

    torchvision prefixes such as "layer1.0." become "layer1_0.", and DistributedDataParallel's prefix "module." is
    removed.
    """
    unwrapped = strip_wrapper_prefix(state)
    return {re.sub(r"^layer(\d)\.(\d+)\.", r"layer\1_\2.", name): tensor for name, tensor in unwrapped.items()}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], file: str) -> None:
    """Copy the tensors `weights` of a state dict into a model.

    If the state dict lacks BatchNorm's buffer num_batches_tracked, as in old versions of PyTorch, the model keeps its
    own value of the buffer. Raises UserError if the state dict does not match the model; `file` is the file name in the
    error message.
    """
    expected = model.state_dict()
    state = {name: tensor for name, tensor in expected.items() if name.endswith(".num_batches_tracked")}
    state |= weights if weights.keys() <= expected.keys() else convert_parameter_names(weights)
    missing = list_saved_tensors(model).keys() - state.keys()
    unexpected = state.keys() - expected.keys()

    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise UserError(
                f"weights={file}: {problem} tensor {min(names)} ({len(names)} in total); the file is from another model"
            )

    for name, tensor in state.items():
        shape = tensor.shape
        expected_shape = expected[name].shape
        if shape == expected_shape:
            continue
        remedy = OTHER_REMEDY
        if name == "conv1.weight" and shape[2:] != expected_shape[2:]:
            remedy = RESNET18_REMEDY if isinstance(model, ResNet18) else SIZE_REMEDY
        raise UserError(f"weights={file}: {name} has shape {tuple(shape)}, expected {tuple(expected_shape)}; {remedy}")

    model.load_state_dict(state, strict=False)  # the names of shared parameters may be missing


def read_weights(text: str, runs: Path) -> Mapping[str, Any]:
    """Return the state dict that the setting `weights` refers to.

    `text` is a run, a checkpoint folder, a safetensors file, or a file written by torch.save. Raises UserError if the
    file or folder does not exist or cannot be read.
    """
    path = find_initial_weights(text, runs)
    if (path / "config.yaml").is_file():  # `path` is the folder of a run
        _, tensors = read_model(RunFolder(path.absolute()))
        return tensors
    if path.is_dir():
        return read_model_of_checkpoint(path, text)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    problem = f"weights={text}: not a state dict"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 (torch raises many types of errors, and their messages recommend unsafe loading)
        raise UserError(f"{problem}: expected a file written by torch.save that contains only tensors") from None
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError(f"{problem}: expected a mapping from names to tensors")
    return state


def read_model_of_checkpoint(path: Path, text: str) -> dict[str, Tensor]:
    """Return the state dict of the full model in a checkpoint folder.

    `path` is a folder such as runs/<id>/attempts/0001/checkpoints/step-00000100. Raises UserError if the folder is not
    a valid checkpoint. `text` is the setting `weights`, for error messages.
    """
    try:
        path = path.absolute()
        attempt_number = int(path.parents[1].name)
        step = int(path.name.removeprefix("step-"))
        attempt = RunFolder(path.parents[3], attempt_number)
        return rank_file.read_full_model(CheckpointPath(attempt, step))
    except (ValueError, IndexError):
        raise UserError(f"weights={text} must be a run folder or a checkpoint folder inside a run folder") from None
    except InvalidCheckpoint as reason:
        raise UserError(f"weights={text}: invalid checkpoint: {reason}") from None


def load_model_of_newest_checkpoint(folder: RunFolder) -> tuple[int, nn.Module] | None:
    """Return the step and the model of the newest valid checkpoint of a run, or None if there is no such checkpoint.

    The model is in eval mode. Raises UserError if the network cannot be rebuilt.
    """
    for checkpoint in storage.list_resumable_checkpoints(folder):
        try:
            state, common = rank_file.read_model_and_common_state(checkpoint)
        except InvalidCheckpoint:
            continue
        model = build_model(common.get("recipe", {}), code=folder.path / "code")
        model.to(next(tensor.dtype for tensor in state.values() if tensor.is_floating_point()))
        load_weights(model, state, str(checkpoint))
        return checkpoint.step, model.eval().requires_grad_(False)
    return None
