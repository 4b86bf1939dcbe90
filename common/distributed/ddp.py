"""DistributedDataParallel: communication hooks, buckets, and their warm-up.

Buckets: arXiv 2006.15704; PowerSGD: arXiv 1905.13727; volume of a ring all-reduce: Patarasuk and Yuan, 2009.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.core.seeds import pack_rng_state, unpack_rng_state

BYTES = {"fp16": 2, "bf16": 2}  # of one number on the way
ONE_BUCKET_MB = 1 << 20  # more than any model has


def make_local_buffer_options() -> dict[str, Any]:
    """Return the argument of DDP that leaves each rank its own buffers.

    It saves a broadcast per step: training does not read buffers, and before an evaluation they are averaged. torch
    before 2.15 knows only the second name, and later ones warn of it, hence the look at the signature.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


class UncompiledDDP(DistributedDataParallel):
    """DDP without the compiler's hook in its forward, which imports the compiler."""

    _inside_ddp_forward = contextlib.contextmanager(inspect.unwrap(DistributedDataParallel._inside_ddp_forward))


@contextlib.contextmanager
def hide_compiler() -> Iterator[None]:
    """Let DDP be built in the block without importing the compiler, where nothing has imported it before.

    DDP asks the compiler for its mode, and so imports it: most of the time that importing torch itself takes. Where
    nothing is compiled, a stand-in answers with the default.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    mode = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    torch._dynamo = SimpleNamespace(utils=mode)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo  # whoever asks for it from now on gets the real one


def wrap_ddp(model: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Wrap a model so that its backward averages gradients over all ranks; `options` are torch's own."""
    ids = [device.index] if device.type == "cuda" else None
    options = make_local_buffer_options() | options
    kind = DistributedDataParallel if "torch._dynamo" in sys.modules else UncompiledDDP
    with hide_compiler():
        replica = kind(model, device_ids=ids, **options)
    setattr(replica, OPTIONS, options)
    return replica


def rewrap_ddp(replica: nn.Module | None) -> None:
    """Wrap the model again, in the same wrapper, on a CPU and over the process group that now is the default one.

    Parameters and buffers stay each rank's own.
    """
    if not isinstance(replica, DistributedDataParallel):
        return
    options, communication = getattr(replica, OPTIONS), getattr(replica, COMMUNICATION, "none")
    for parameter in replica.parameters():
        parameter.grad = None  # it may lie in a bucket of the old wrapper
    with hide_compiler():
        DistributedDataParallel.__init__(replica, replica.module, **(options | {"init_sync": False}))
    setattr(replica, OPTIONS, options)
    register_comm_hook(replica, communication, 0)


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the model without its wrapper, which would put `module.` before every name."""
    return model.module if isinstance(model, DistributedDataParallel | nn.DataParallel) else model


def choose_bucket_mb(communication: str, asked: float, backend: str) -> float:
    """Return the bucket size to use, in MB: one bucket for PowerSGD on CPUs.

    Its steps are begun by callbacks, in another order on each rank where there are several buckets; gloo aborts then.
    """
    return ONE_BUCKET_MB if communication == "powersgd" and backend != "nccl" else asked


def register_comm_hook(ddp: DistributedDataParallel, communication: str, rank: int) -> None:
    """Register the communication hook named by `communication`; `rank` is PowerSGD's matrix rank."""
    setattr(ddp, COMMUNICATION, communication)
    match communication:
        case "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "bf16":
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        case "powersgd":
            state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=10)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            setattr(ddp, COMPRESSION, state)


def get_powersgd_state(model: nn.Module) -> powerSGD_hook.PowerSGDState | None:
    """Return the state of PowerSGD of a wrapped model; None where another hook or none is registered."""
    return getattr(model, COMPRESSION, None)


COMPRESSION = "compression"  # the attribute of a wrapped model that holds PowerSGD's state
OPTIONS, COMMUNICATION = "options", "communication"  # those that hold what it is wrapped with
MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict")  # of PowerSGDState, tensors by the number of a bucket


def capture_powersgd_state(state: powerSGD_hook.PowerSGDState) -> dict[str, Any]:
    """Return PowerSGD's state on this rank: residual errors, factors P and Q, step, random state."""
    found: dict[str, Any] = {name: dict(getattr(state, name)) for name in MEMORY}
    return found | {"iter": int(state.iter), "rng": pack_rng_state(state.rng.get_state())}


def load_powersgd_state(state: powerSGD_hook.PowerSGDState, saved: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state that `capture_powersgd_state` returned, on a device."""
    for name in MEMORY:
        setattr(state, name, {bucket: value.to(device) for bucket, value in saved[name].items()})
    state.iter = saved["iter"]
    state.rng.set_state(unpack_rng_state(saved["rng"]))


def compute_ring_bytes(model: nn.Module) -> int:
    """Return the bytes that each rank sends per step in a ring all-reduce of all gradients, as gloo does it.

    Each of p ranks sends 2 (p - 1) / p of the bytes it holds. 0 for a model without DDP.
    """
    if not isinstance(model, DistributedDataParallel):
        return 0
    size = dist.get_world_size()
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return 2 * (size - 1) * held // size


def warm_up_buckets(model: nn.Module, x: Tensor) -> None:
    """Run one forward and backward without update, so that every step of every attempt reduces in the same order.

    DDP rebuilds its buckets before its second forward, by the order in which gradients became ready in the first
    backward. Without this the first step after a resume is reduced in other buckets than the same step of an
    uninterrupted run: with three ranks or more, other rounding. `x` is the shard of some batch on this rank. Models
    without DDP stay as they are.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    with restore_buffers_and_rng(model, x.device):
        model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def restore_buffers_and_rng(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Bring buffers and random state back at the end of the block, in which forwards are made that do not train."""
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
