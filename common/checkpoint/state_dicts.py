"""What a process is made of, as plain tensors under full names, and back: parameters, optimizer, random states.

Names are those of the whole model, so that a state saved by a pipeline's stages, by sharded processes or by one
process can be loaded by any of the others. Of sharded tensors the whole is kept: their functions are collectives.
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
    """The value as it can be written and read again: tensors without history, dicts, lists, tuples and primitives.

    Raises TypeError naming the place of anything else: it would be written, but never be read.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds whole tensors")
        value = value.detach()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()  # of a view, everything behind it would be written
    if isinstance(value, Mapping):
        return {to_plain(key, where): to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if type(value) not in PRIMITIVES:
        raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors and primitives only")
    return value


def full_tensor(value: Any) -> Any:
    """A tensor that is sharded over processes, put together on each of them; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as `target` is."""
    if not hasattr(target, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor  # two seconds to import

    assert isinstance(target, DTensor)
    # all processes have read the same: nothing needs to be sent
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


# ---- parameters and buffers


def collect_tensors(named: Named, keep: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers by name. With `keep` false the process only helps to put sharded ones together."""
    found = {name: full_tensor(tensor.detach()) for name, tensor in named}
    return found if keep else {}


def strip_wrapper_prefix(saved: Mapping[str, T]) -> dict[str, T]:
    """The same under the model's own names, if a wrapper such as DataParallel has put `module.` before them all."""
    wrapped = bool(saved) and all(name.startswith(WRAPPER) for name in saved)
    return {name.removeprefix(WRAPPER) if wrapped else name: value for name, value in saved.items()}


@torch.no_grad()
def load_tensors(named: Named, saved: Mapping[str, Tensor]) -> None:
    """Copy saved values into this process's parameters and buffers. Raises UserError where they do not fit.

    They may have been saved by a wrapper, whose `module.` stands before every name.
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
    """What an optimizer remembers of each parameter, by the parameter's name; `keep` as for `collect_tensors`."""
    found = {
        name: {key: full_tensor(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in named
        if parameter in optimizer.state
    }
    return found if keep else {}


def load_optimizer_state(optimizer: Optimizer, named: Named, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Give an optimizer its memory back; its settings, such as the learning rate, stay as they are."""
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
    """A copy of a remembered value, cut like the parameter if it is shaped like it."""
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
    """Where the global random streams of this process stand: torch, CUDA if it is used, numpy, python."""
    version, numbers, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": seeds.pack_rng_state(np.random.get_state(legacy=True)),
        "python": [version, list(numbers), following],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Go on where `capture_rng_state` was taken."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(seeds.unpack_rng_state(state["numpy"]))
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
