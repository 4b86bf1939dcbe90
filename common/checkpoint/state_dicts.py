"""State of a rank as plain tensors by fully qualified name, and back: parameters, optimizer, random states.

Names are those of the full model, so that a state saved by the stages of a pipeline, by sharded ranks or by one rank
can be loaded by any of the others. Of sharded parameters (FSDP, arXiv 2304.11277) the full tensors are saved, which
collectives of all ranks gather.
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
Named = Iterable[tuple[str, Tensor]]
WRAPPER = "module."  # what DistributedDataParallel and DataParallel call the model in them
PRIMITIVES = (str, int, float, bool, bytes, type(None))


def to_plain(value: Any, where: str) -> Any:
    """Return a value as it can be written and read again: detached tensors, dicts, lists, tuples and primitives.

    Raises TypeError naming the position of anything else: it would be written, but never be read.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds full tensors")
        value = value.detach()
        is_view = value.untyped_storage().nbytes() != value.numel() * value.element_size()
        return value.clone() if is_view else value  # with a view its whole storage would be written
    if isinstance(value, Mapping):
        return {to_plain(key, where): to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) not in PRIMITIVES:
        raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors and primitives only")
    return value


def full_tensor(value: Any) -> Any:
    """Return the full tensor of a sharded one, on each rank; anything else unchanged. All ranks call it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, sharded like `target`; the full tensor if that is not sharded."""
    if not hasattr(target, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor  # two seconds to import

    assert isinstance(target, DTensor)
    # all ranks have read the same: nothing needs to be sent
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


# ---- parameters and buffers


def gather_full_tensors(named: Named, keep: bool = True) -> dict[str, Tensor]:
    """Return full parameters or buffers by name; {} without `keep`, where this rank only joins the collectives."""
    found = {name: full_tensor(tensor.detach()) for name, tensor in named}
    return found if keep else {}


def strip_wrapper_prefix(saved: Mapping[str, T]) -> dict[str, T]:
    """Remove `module.`, which a wrapper such as DataParallel puts before all names."""
    wrapped = bool(saved) and all(name.startswith(WRAPPER) for name in saved)
    return {name.removeprefix(WRAPPER) if wrapped else name: value for name, value in saved.items()}


@torch.no_grad()
def load_tensors(named: Named, saved: Mapping[str, Tensor]) -> None:
    """Copy saved full tensors into this rank's parameters or buffers, which may be sharded.

    A wrapper's `module.` may precede all names. Raises UserError for a missing name or another shape.
    """
    saved = strip_wrapper_prefix(saved)
    for name, tensor in named:
        if name not in saved:
            raise UserError(
                f"the checkpoint has no {name}: it is of another model; resume with the settings of its run"
            )
        if saved[name].shape != tensor.shape:
            shapes = f"{tuple(saved[name].shape)}, here {tuple(tensor.shape)}"
            raise UserError(f"the checkpoint's {name} has shape {shapes}; resume with the settings of its run")
        tensor.copy_(shard_like(saved[name], tensor))


# ---- optimizers


def collect_optimizer_state(optimizer: Optimizer, named: Named, keep: bool = True) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of each parameter by the parameter's name; `keep` as in `gather_full_tensors`."""
    found = {
        name: {key: full_tensor(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in named
        if parameter in optimizer.state
    }
    return found if keep else {}


def load_optimizer_state(optimizer: Optimizer, named: Named, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore an optimizer's state of each parameter; lr and the other settings of its groups stay as they are."""
    names, saved = {parameter: name for name, parameter in named}, strip_wrapper_prefix(saved)
    content = optimizer.state_dict()
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    content["state"] = {
        number: {key: clone_sharded(value, parameter) for key, value in saved[names[parameter]].items()}
        for number, parameter in enumerate(ours)
        if names[parameter] in saved
    }
    optimizer.load_state_dict(content)


def clone_sharded(value: Any, parameter: Tensor) -> Any:
    """Copy a value of the optimizer's state, sharded like the parameter if it has its shape."""
    if not isinstance(value, Tensor):
        return value
    return shard_like(value, parameter).clone() if value.shape == parameter.shape else value.clone()


# ---- random states


def seed_global_rngs(seed: int) -> None:
    """Seed the global random generators of torch, numpy and python, on all ranks alike."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_rng_state() -> dict[str, Any]:
    """Return the states of this rank's global random generators: torch, CUDA if it is used, numpy, python."""
    version, numbers, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": seeds.pack_rng_state(np.random.get_state(legacy=True)),
        "python": [version, list(numbers), following],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states that `capture_rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(seeds.unpack_rng_state(state["numpy"]))
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
