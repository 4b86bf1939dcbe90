"""Report on the memory of parameters, gradients and optimizer state on each rank."""

from __future__ import annotations

import itertools

from torch import Tensor
from torch.optim import Optimizer

from common.measure.memory import format_megabytes, get_local_shard
from common.ranks.rendezvous import World
from common.runs.result import ReportData


def report_state_bytes(optimizer: Optimizer, world: World) -> ReportData:
    """Report the size in bytes of the parameters, gradients and optimizer state on each rank.

    If they are divided among the ranks, the report also contains the bytes that each rank would store without sharding.
    All ranks must call this function.
    """
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states: list[list[Tensor]] = []  # of each parameter
    for parameter in parameters:
        parameter_state = optimizer.state.get(parameter, {})
        states.append([value for value in parameter_state.values() if isinstance(value, Tensor)])
    state = list(itertools.chain.from_iterable(states))

    local_bytes: dict[str, int] = {}
    for kind, tensors in (("parameters", parameters), ("gradients", gradients), ("optimizer", state)):
        local_bytes[kind] = sum(get_local_shard(tensor).nbytes for tensor in tensors)
    full_state_bytes = []
    for tensors in states:
        full_state_bytes.append(sum(tensor.nbytes for tensor in tensors))

    ranks = world.gather([local_bytes, full_state_bytes])
    if not ranks:  # only rank 0 creates the report
        return ReportData()

    full_bytes = sum(tensor.nbytes for tensor in parameters + gradients)
    for state_bytes in zip(*(rank_states for _, rank_states in ranks), strict=True):
        full_bytes += max(state_bytes)  # 0 on a rank without the state of this parameter

    totals = {f"rank {rank}": sum(kinds.values()) for rank, (kinds, _) in enumerate(ranks)}
    text = format_megabytes(totals) + "of parameters, gradients and optimizer state"
    if full_bytes > max(totals.values()):
        text += f"; without sharding, each rank would need {full_bytes / 1e6:,.1f} MB"

    bytes_by_kind: dict[str, list[int]] = {}
    for kind in local_bytes:
        bytes_by_kind[kind] = [kinds[kind] for kinds, _ in ranks]
    measured = {"state_bytes": bytes_by_kind, "unsharded_state_bytes": full_bytes}
    return ReportData({"training state": text}, measured=measured)
