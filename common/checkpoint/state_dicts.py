"""Conversion of parameters, optimizer and random states to plain tensors by fully qualified name, and back.

Names are those of the full model, so a state saved by pipeline stages, by sharded ranks or by a single rank can be
loaded in any of these layouts. For sharded parameters (FSDP, arXiv 2304.11277) all ranks gather the full tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from common.core import seeds
from common.core.errors import UserError

T = TypeVar("T")
NamedTensors = Iterable[tuple[str, Tensor]]
WRAPPER_PREFIX = "module."  # of all names in DistributedDataParallel and DataParallel
PRIMITIVES = (str, int, float, bool, bytes, type(None))


def to_plain(value: Any, name: str) -> Any:
    """Return a value that can be saved and loaded: detached tensors, dicts, lists, tuples and primitives.

    Raises TypeError with the position in `name` of anything else: it could be saved, but not loaded.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{name} is a {kind}; a checkpoint can contain only full, plain tensors")
        tensor = value.detach()
        is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        return tensor.clone() if is_view else tensor  # saving a view would save its whole storage
    if isinstance(value, Mapping):
        return {to_plain(key, name): to_plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    if type(value) not in PRIMITIVES:
        raise TypeError(f"{name} is a {kind}; a checkpoint contains tensors and primitives only")
    return value


def gather_full_tensor(value: Any) -> Any:
    """Return the full tensor of a sharded one on every rank, and anything else unchanged. All ranks call it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, or the full tensor if `target` is not sharded."""
    if not hasattr(target, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes two seconds to import

    assert isinstance(target, DTensor)
    # all ranks have loaded the full tensor: nothing is sent
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


# ---- parameters and buffers


def gather_full_tensors(tensors: NamedTensors, keep: bool = True) -> dict[str, Tensor]:
    """Return full parameters or buffers by name. Without `keep` only join the collectives and return {}."""
    full = {name: gather_full_tensor(tensor.detach()) for name, tensor in tensors}
    return full if keep else {}


def strip_wrapper_prefix(saved: Mapping[str, T]) -> dict[str, T]:
    """Remove the prefix `module.` if all names have it, as in a model wrapped by DataParallel."""
    if not all(name.startswith(WRAPPER_PREFIX) for name in saved):
        return dict(saved)
    return {name.removeprefix(WRAPPER_PREFIX): value for name, value in saved.items()}


@torch.no_grad()
def load_tensors(tensors: NamedTensors, saved: Mapping[str, Tensor]) -> None:
    """Copy saved full tensors into this rank's parameters or buffers, which may be sharded.

    All saved names may have the prefix `module.`. Raises UserError for a missing name or another shape.
    """
    saved = strip_wrapper_prefix(saved)
    for name, tensor in tensors:
        if name not in saved:
            raise UserError(
                f"the checkpoint has no {name}: it is of another model; resume with the settings of its run"
            )
        if saved[name].shape != tensor.shape:
            shapes = f"{tuple(saved[name].shape)}, here {tuple(tensor.shape)}"
            raise UserError(f"the checkpoint's {name} has shape {shapes}; resume with the settings of its run")
        tensor.copy_(shard_like(saved[name], tensor))


# ---- optimizers


def collect_optimizer_state(
    optimizer: Optimizer, parameters: NamedTensors, keep: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the full optimizer state of each parameter by name; `keep` as in `gather_full_tensors`."""
    collected = {}
    for name, parameter in parameters:
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            collected[name] = {key: gather_full_tensor(value) for key, value in state.items()}
    return collected if keep else {}


def load_optimizer_state(
    optimizer: Optimizer, parameters: NamedTensors, saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore an optimizer's state of each parameter. The settings of its groups, such as lr, stay unchanged."""
    names = {parameter: name for name, parameter in parameters}
    saved = strip_wrapper_prefix(saved)
    content = optimizer.state_dict()
    content["state"] = {}
    index = 0  # of a parameter, in the order of the groups
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = saved.get(names[parameter])
            if state is not None:
                content["state"][index] = {key: clone_sharded(value, parameter) for key, value in state.items()}
            index += 1
    optimizer.load_state_dict(content)


def clone_sharded(value: Any, parameter: Tensor) -> Any:
    """Copy a value of an optimizer's state, sharded like the parameter if it has the same shape."""
    if not isinstance(value, Tensor):
        return value
    return shard_like(value, parameter).clone() if value.shape == parameter.shape else value.clone()


# ---- random states


def seed_global_rngs(seed: int) -> None:
    """Seed the global random generators of torch, numpy and python, equally on all ranks."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_rng_state() -> dict[str, Any]:
    """Return the states of this rank's global random generators: torch, CUDA if it is used, numpy, python."""
    version, numbers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": seeds.pack_rng_state(np.random.get_state(legacy=True)),
        "python": [version, list(numbers), next_gauss],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states returned by `capture_rng_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(seeds.unpack_rng_state(state["numpy"]))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
