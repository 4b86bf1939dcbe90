"""DistributedDataParallel (DDP): wrapping of models, communication hooks, and gradient buckets.

Sources: arXiv 2006.15704 (buckets), arXiv 1905.13727 (PowerSGD), and Patarasuk and Yuan 2009 (bytes sent in a ring
all-reduce).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.checkpoint.local_part import LocalPart
from common.data.loader import Loader
from common.system.seeds import pack_rng_state, unpack_rng_state
from common.training.hooks import StepHook
from common.training.run_context import RunContext

HOOK_ELEMENT_BYTES = {"fp16": 2, "bf16": 2}  # number of bytes that a communication hook sends per gradient element
ONE_BUCKET_MB = 1 << 20  # larger than the gradients of any model
POWERSGD_START_STEP = 10  # first step with compressed gradients; the bucket warm-up is PowerSGD's iteration 0
POWERSGD_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")  # state attributes that map each bucket to a tensor

# Names of attributes that are added to a wrapped model.
OPTIONS_ATTRIBUTE = "options"  # arguments of the DDP constructor
COMMUNICATION_ATTRIBUTE = "communication"  # name of the communication hook
POWERSGD_ATTRIBUTE = "compression"  # state of PowerSGD


def make_unsynchronized_buffer_options() -> dict[str, Any]:
    """Return the DDP argument that disables the broadcast of buffers before each forward pass.

    This broadcast is unnecessary, because training does not read buffers, and buffers are averaged before an
    evaluation. The name of the argument depends on the version of torch: versions before 2.15 have only
    `broadcast_buffers`, which is deprecated in later versions.
    """
    parameters = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    return {name: False}


class UncompiledDDP(DistributedDataParallel):
    """DDP whose forward pass omits the compiler hook, because this hook would import torch's compiler."""

    _inside_ddp_forward = contextlib.contextmanager(inspect.unwrap(DistributedDataParallel._inside_ddp_forward))


@contextlib.contextmanager
def avoid_compiler_import() -> Iterator[None]:
    """Avoid importing torch's compiler while DDP is constructed in the `with` block.

    The DDP constructor asks torch's compiler for its mode and thereby imports the compiler, which takes almost as long
    as importing torch. If the compiler has not been imported yet, this context manager replaces it with a stub that
    returns the default mode.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    mode = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    torch._dynamo = SimpleNamespace(utils=mode)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo  # later accesses will import the real module


def wrap_ddp(model: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Wrap a model in DDP, so that its backward pass averages gradients over all ranks.

    `options` are passed to the DDP constructor.
    """
    device_ids = [device.index] if device.type == "cuda" else None
    options = make_unsynchronized_buffer_options() | options
    wrapper_class = DistributedDataParallel if "torch._dynamo" in sys.modules else UncompiledDDP
    with avoid_compiler_import():
        replica = wrapper_class(model, device_ids=device_ids, **options)
    setattr(replica, OPTIONS_ATTRIBUTE, options)
    return replica


def replicate(
    model: nn.Module, run: RunContext, forward: Callable[[nn.Module, Tensor], Tensor] | None = None, **options: Any
) -> DistributedDataParallel:
    """Wrap a model in DDP for the training of a run.

    In addition to `wrap_ddp`, the buckets of DDP are warmed up before the first step, and the state of its
    communication hook is saved in checkpoints. `forward(replica, x)` computes the outputs, by default by calling the
    replica. `options` are passed to the DDP constructor.
    """
    replica = wrap_ddp(model, run.device, **options)
    run.add_hook(BucketWarmUp(run, replica, partial(forward, replica) if forward else replica))
    run.add_local_part("compression", ReplicaState(replica))
    return replica


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper, which would add the prefix `module.` to parameter names."""
    return model.module if isinstance(model, DistributedDataParallel | nn.DataParallel) else model


def choose_bucket_mb(communication: str, requested_mb: float, backend: str) -> float:
    """Return the bucket size in MB: one bucket for PowerSGD on CPUs, otherwise the requested size.

    With several buckets, the callbacks of PowerSGD can start its collectives in different orders on different ranks,
    and gloo then aborts.
    """
    return ONE_BUCKET_MB if communication == "powersgd" and backend != "nccl" else requested_mb


def register_comm_hook(ddp: DistributedDataParallel, communication: str, rank: int) -> None:
    """Register the communication hook named by `communication`.

    `rank` is the matrix rank of the approximations that PowerSGD sends, not a process rank.
    """
    setattr(ddp, COMMUNICATION_ATTRIBUTE, communication)
    match communication:
        case "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "bf16":
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        case "powersgd":
            state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=POWERSGD_START_STEP)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            setattr(ddp, POWERSGD_ATTRIBUTE, state)


class ReplicaState(LocalPart):
    """State of a model's DDP wrapper on one rank, which includes the errors and factors of PowerSGD.

    A model without DDP has no such state.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def powersgd(self) -> powerSGD_hook.PowerSGDState | None:
        """State of the PowerSGD hook; None if the model has no such hook."""
        return getattr(self.model, POWERSGD_ATTRIBUTE, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the PowerSGD state: residual errors, factors P and Q, step, and random state."""
        if self.powersgd is None:
            return {}
        state: dict[str, Any] = {name: dict(getattr(self.powersgd, name)) for name in POWERSGD_TENSORS}
        state["matrix_rank"] = self.powersgd.matrix_approximation_rank
        state["iter"] = int(self.powersgd.iter)
        state["rng"] = pack_rng_state(self.powersgd.rng.get_state())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a PowerSGD state, and move its tensors to the device of the model.

        Factors of another matrix rank than `powersgd_rank` are not loaded; PowerSGD then starts with new factors.
        """
        if self.powersgd is None or not state:
            return
        device = next(self.model.parameters()).device
        matrix_rank = self.powersgd.matrix_approximation_rank
        has_same_rank = state.get("matrix_rank", matrix_rank) == matrix_rank
        for name in POWERSGD_TENSORS if has_same_rank else POWERSGD_TENSORS[:1]:
            setattr(self.powersgd, name, {bucket: tensor.to(device) for bucket, tensor in state[name].items()})
        self.powersgd.iter = state["iter"]
        self.powersgd.rng.set_state(unpack_rng_state(state["rng"]))

    def enter_group(self) -> None:
        """Reinitialize the DDP wrapper in place for the current default process group.

        The model must be on the CPU. Parameters and buffers keep the values that they have on each rank.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            return
        options = getattr(model, OPTIONS_ATTRIBUTE)
        communication = getattr(model, COMMUNICATION_ATTRIBUTE, "none")
        for parameter in model.parameters():
            parameter.grad = None  # the gradient may be a view of a bucket of the old wrapper
        with avoid_compiler_import():
            DistributedDataParallel.__init__(model, model.module, **(options | {"init_sync": False}))
        setattr(model, OPTIONS_ATTRIBUTE, options)
        register_comm_hook(model, communication, 0)


def compute_ring_all_reduce_bytes(model: nn.Module) -> int:
    """Return the number of bytes that each rank sends per step if a ring all-reduce sums the gradients.

    gloo uses the ring algorithm. Each of p ranks sends 2 (p - 1) / p times the size of its gradients in bytes. The
    result is 0 for a model without DDP.
    """
    if not isinstance(model, DistributedDataParallel):
        return 0
    ranks = dist.get_world_size()
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return 2 * (ranks - 1) * gradient_bytes // ranks


def warm_up_buckets(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> None:
    """Run a forward and a backward pass without an update, so that all steps use the same buckets.

    Before its second forward pass, DDP rebuilds its buckets in the order in which gradients became ready in the first
    backward pass. Without the warm-up, the first step after a resume and the same step of an uninterrupted run would
    use different buckets. With three or more ranks, the gradients of these two steps would then be rounded differently.
    PowerSGD counts the warm-up as an iteration. `x` is this rank's shard of any batch. `forward` computes the outputs,
    by default by calling the model.
    """
    with restore_buffers_and_rng(model, x.device):
        (forward or model)(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


class BucketWarmUp(StepHook):
    """Hook that warms up the buckets of DDP before a checkpoint is loaded; see `warm_up_buckets`."""

    def __init__(self, run: RunContext, replica: DistributedDataParallel, forward: Callable[[Tensor], Tensor]) -> None:
        self.run = run
        self.replica = replica
        self.forward = forward

    def before_load(self) -> None:
        """Warm up the buckets with this rank's shard of the first samples."""
        assert self.run.state is not None and isinstance(self.run.state.loader, Loader)
        x = self.run.load_first_inputs(self.run.state.loader.local_samples)
        warm_up_buckets(self.replica, x, self.forward)


@contextlib.contextmanager
def restore_buffers_and_rng(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers and torch's random state after the `with` block.

    Use this context manager for forward passes that are not part of training.
    """
    saved_buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, saved in zip(model.buffers(), saved_buffers, strict=True):
            buffer.copy_(saved)
