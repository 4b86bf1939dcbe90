"""Division of an optimizer's state among ranks (ZeRO stage 1, Rajbhandari et al. 2019, arXiv 1910.02054).

torch's `ZeroRedundancyOptimizer` is not used, because it does not accept the DTensors of tensor parallelism, and its
state can be collected only with pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from common.measure.memory import get_local_shard
from common.techniques.sharded_optimizer.api import assign_to_ranks
from common.training.hooks import StepHook
from common.training.run_context import RunContext


def divide_optimizer_state(run: RunContext, group: dist.ProcessGroup | None = None) -> None:
    """Let each rank of a group keep the optimizer state of some parameters, and update only these parameters.

    The ranks of `group`, by default all ranks, must have equal parameters and gradients. After each step of the
    registered optimizer, every rank receives the parameters that the other ranks have updated. The optimizer must
    update each parameter independently of the others, like those of torch. All ranks must call this function before the
    first step.
    """
    if group is None:
        group = dist.group.WORLD
    assert group is not None
    run.add_hook(OptimizerDivision(run, group))


class OptimizerDivision(StepHook):
    """Hook that divides the state of a run's optimizer among the ranks of a group."""

    def __init__(self, run: RunContext, group: dist.ProcessGroup) -> None:
        self.run = run
        self.group = group
        self.shards: OptimizerShards | None = None

    def before_load(self) -> None:
        assert self.run.state is not None and self.run.state.optimizer is not None
        self.shards = OptimizerShards(self.run.state.optimizer, self.group)

    def on_start(self) -> None:
        assert self.shards is not None
        self.shards.start()


class OptimizerShards:
    """Shards of an optimizer's state, one for each rank of a group.

    The optimizer has all parameters, but during its step, only the parameters of this rank have gradients. An optimizer
    creates no state for a parameter without a gradient. A checkpoint therefore contains the states of all ranks, under
    the names of the parameters.
    """

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
        self.optimizer = optimizer
        self.group = group
        self.rank = group.rank()
        self.ranks = group.size()
        self.parameters: list[Tensor] = []
        for parameter_group in optimizer.param_groups:
            self.parameters += parameter_group["params"]
        sizes = [parameter.numel() if parameter.requires_grad else 0 for parameter in self.parameters]
        self.owners = assign_to_ranks(sizes, self.ranks)
        """For each parameter, the rank in the group that updates it."""
        self.hidden_gradients: list[tuple[Tensor, Tensor | None]] = []
        """During a step of the optimizer, the parameters of other ranks and their gradients."""
        optimizer.register_load_state_dict_pre_hook(self._select_local_state)

    def start(self) -> None:
        """Install the hooks of the optimizer's step, after the hooks that need the gradients of all parameters."""
        self._drop_states_of_other_ranks()
        self.optimizer.register_step_pre_hook(lambda *_: self._hide_gradients_of_other_ranks())
        self.optimizer.register_step_post_hook(lambda *_: self._complete_step())

    def _select_local_state(self, _: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a checkpoint without the states of other ranks, which may not fit on this device."""
        state = {number: values for number, values in content["state"].items() if self.owners[number] == self.rank}
        return content | {"state": state}

    def _drop_states_of_other_ranks(self) -> None:
        """Delete states that a custom optimizer has created or loaded for the parameters of other ranks."""
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            if owner != self.rank:
                self.optimizer.state.pop(parameter, None)

    def _hide_gradients_of_other_ranks(self) -> None:
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            if owner != self.rank:
                self.hidden_gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def _complete_step(self) -> None:
        """Restore the hidden gradients, and exchange the updated parameters."""
        for parameter, gradient in self.hidden_gradients:
            parameter.grad = gradient
        self.hidden_gradients.clear()
        self._drop_states_of_other_ranks()
        self._gather_updated_parameters()

    def _gather_updated_parameters(self) -> None:
        """Replace the parameters of other ranks by the values that these ranks have computed, in one all-gather."""
        shards: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        dtype = torch.bool  # the smallest type, to which no value is converted
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            if parameter.requires_grad:
                shards[owner].append(get_local_shard(parameter.detach()))
                dtype = torch.promote_types(dtype, parameter.dtype)

        # All-gathers need equal sizes, so each shard is padded to the size of the largest one.
        size = max(map(count_values, shards))
        device = self.parameters[0].device
        gathered = torch.empty(self.ranks * size, dtype=dtype, device=device)
        updated = torch.zeros(size, dtype=dtype, device=device)
        for tensor, part in zip(shards[self.rank], split_like(updated, shards[self.rank]), strict=True):
            part.copy_(tensor)
        dist.all_gather_into_tensor(gathered, updated, group=self.group)

        for rank, flat in enumerate(gathered.chunk(self.ranks)):
            if rank != self.rank:
                for tensor, part in zip(shards[rank], split_like(flat, shards[rank]), strict=True):
                    tensor.copy_(part)


def count_values(tensors: Sequence[Tensor]) -> int:
    """Return the number of values of all tensors together."""
    return sum(tensor.numel() for tensor in tensors)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of consecutive values of a flat tensor, with the shapes of the given tensors."""
    views = []
    start = 0
    for tensor in tensors:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return views
