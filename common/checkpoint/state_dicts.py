"""Conversion of parameters, optimizer states and random states to plain tensors, and back.

Tensors are saved under the fully qualified names that they have in the full model. A state saved by pipeline stages, by
sharded ranks or by a single rank can therefore be loaded in any of these layouts. For sharded parameters (FSDP, arXiv
2304.11277), all ranks gather the full tensors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from common.system import seeds
from common.system.errors import UserError

T = TypeVar("T")
NamedTensors = Iterable[tuple[str, Tensor]]
WRAPPER_PREFIX = "module."  # prefix that DistributedDataParallel and DataParallel add to all names
PRIMITIVES = (str, int, float, bool, bytes, type(None))


def convert_to_plain_values(value: Any, name: str) -> Any:
    """Convert a value to detached tensors, dicts, lists, tuples and primitives.

    `name` is the name of the value in error messages. Raises TypeError if the value contains any other type, because
    such a value could be saved but not loaded.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{name} has type {kind}; a checkpoint can contain only full tensors of type torch.Tensor")
        tensor = value.detach()
        is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        return tensor.clone() if is_view else tensor  # torch.save of a view would save its entire storage
    if isinstance(value, Mapping):
        return {
            convert_to_plain_values(key, name): convert_to_plain_values(item, f"{name}[{key!r}]")
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(convert_to_plain_values(item, f"{name}[{i}]") for i, item in enumerate(value))
    if type(value) not in PRIMITIVES:
        raise TypeError(f"{name} has type {kind}; a checkpoint can contain only tensors and primitives")
    return value


def gather_full_tensor(value: Any) -> Any:
    """Gather a sharded tensor on every rank, and return any other value unchanged.

    All ranks must call this function.
    """
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, or the full tensor if `target` is not sharded."""
    if not hasattr(target, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor  # this import takes two seconds

    assert isinstance(target, DTensor)
    # With src_data_rank=None, no data is sent: every rank has already loaded the full tensor.
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


# ---- parameters and buffers


def gather_full_tensors(tensors: NamedTensors, keep: bool = True) -> dict[str, Tensor]:
    """Return the full parameters or buffers by name.

    All ranks must call this function. With `keep=False`, the rank only participates in the collectives, and an empty
    dict is returned.
    """
    full = {name: gather_full_tensor(tensor.detach()) for name, tensor in tensors}
    return full if keep else {}


def strip_wrapper_prefix(saved: Mapping[str, T], names: Iterable[str] = ()) -> dict[str, T]:
    """Remove the prefix `module.`, which DataParallel adds, if all saved names have this prefix.

    The prefix is kept if a name of the model, which are `names`, also has it.
    """
    has_prefix = all(name.startswith(WRAPPER_PREFIX) for name in saved)
    if not has_prefix or any(name.startswith(WRAPPER_PREFIX) for name in names):
        return dict(saved)
    return {name.removeprefix(WRAPPER_PREFIX): value for name, value in saved.items()}


@torch.no_grad()
def load_tensors(tensors: NamedTensors, saved: Mapping[str, Tensor]) -> None:
    """Copy saved full tensors into this rank's parameters or buffers, which may be sharded.

    If only the saved names have the prefix `module.`, the prefix is ignored. Raises UserError if a name is missing or
    a shape differs.
    """
    tensors = list(tensors)
    saved = strip_wrapper_prefix(saved, [name for name, _ in tensors])
    for name, tensor in tensors:
        if name not in saved:
            raise UserError(
                f"the checkpoint has no tensor {name}; it was saved from a different model: "
                "resume with the settings of that run"
            )
        if saved[name].shape != tensor.shape:
            shapes = f"{tuple(saved[name].shape)} in the checkpoint but {tuple(tensor.shape)} in this run"
            raise UserError(f"{name} has shape {shapes}; resume with the settings with which the checkpoint was saved")
        tensor.copy_(shard_like(saved[name], tensor))


# ---- optimizers


def collect_optimizer_state(
    optimizer: Optimizer, parameters: NamedTensors, saved_names: Collection[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the full optimizer state of each parameter, by parameter name.

    All ranks that hold a shard of the same state must call this function. With `saved_names`, only the states of these
    parameters are returned; for all other states, the rank only participates in the collectives.
    """
    collected = {}
    for name, parameter in parameters:
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            full_state = {key: gather_full_tensor(value) for key, value in state.items()}
            if saved_names is None or name in saved_names:
                collected[name] = full_state
    return collected


def load_optimizer_state(
    optimizer: Optimizer, parameters: NamedTensors, saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the optimizer state of each parameter.

    The settings of the parameter groups, such as the learning rate, do not change. Parameters without a saved state
    have no state afterward.
    """
    names = {parameter: name for name, parameter in parameters}
    saved = strip_wrapper_prefix(saved, names.values())
    content = optimizer.state_dict()
    content["state"] = {}
    index = 0  # number of the parameter, counted over all groups
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = saved.get(names[parameter])
            if state is not None:
                content["state"][index] = {key: clone_optimizer_value(value, parameter) for key, value in state.items()}
            index += 1
    optimizer.load_state_dict(content)
    restore_state_dtypes(optimizer, content["state"])


def restore_state_dtypes(optimizer: Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Restore the data types of the saved state, by number of the parameter.

    `Optimizer.load_state_dict` converts all tensors except `step` to the data type of the parameter.
    """
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            original = saved.get(index, {}).get(key)
            if isinstance(value, Tensor) and isinstance(original, Tensor) and value.dtype != original.dtype:
                state[key] = original.to(value.device, copy=True)


def clone_optimizer_value(value: Any, parameter: Tensor) -> Any:
    """Copy a value of the optimizer state. A tensor with the shape of the parameter is sharded like the parameter."""
    if not isinstance(value, Tensor):
        return value
    return shard_like(value, parameter).clone() if value.shape == parameter.shape else value.clone()


# ---- random states


def seed_global_rngs(seed: int) -> None:
    """Seed the global random number generators of PyTorch, NumPy and Python with the same seed on all ranks."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def list_gpus() -> list[int]:
    """Return the indices of all visible GPUs, starting with the current GPU, which differs between ranks."""
    current = torch.cuda.current_device()
    count = torch.cuda.device_count()
    return [*range(current, count), *range(current)]


def capture_rng_state() -> dict[str, Any]:
    """Return the states of this rank's global random number generators.

    The generators are those of PyTorch, NumPy, Python, and of all GPUs if CUDA is initialized.
    """
    version, numbers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in list_gpus()] if torch.cuda.is_initialized() else None,
        "numpy": seeds.pack_rng_state(np.random.get_state(legacy=True)),
        "python": [version, list(numbers), next_gauss],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states of the random number generators that `capture_rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        # Older checkpoints contain only the state of the current GPU.
        gpu_states = [state["cuda"]] if isinstance(state["cuda"], Tensor) else state["cuda"]
        for gpu, gpu_state in zip(list_gpus(), gpu_states, strict=False):
            torch.cuda.set_rng_state(gpu_state, gpu)
    np.random.set_state(seeds.unpack_rng_state(state["numpy"]))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
