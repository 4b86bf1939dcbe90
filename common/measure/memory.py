"""Memory that a process takes for its training, and a limit on it to see what a model needs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.core.errors import UserError
from common.distributed.rendezvous import World
from common.runs.result import Facts

PAGE = os.sysconf("SC_PAGE_SIZE")
FULL = (  # as libraries say it, the last one oneDNN
    "not enough memory", "out of memory", "Cannot allocate memory", "std::bad_alloc", "could not create a primitive",
)  # fmt: skip


class Footprint:
    """The most memory that was held at any call of `record_peak`, beyond that held at the start; in bytes.

    On a CPU this process's own pages, files that it maps left out; on a GPU what torch's tensors take there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if not self.cuda:
            with contextlib.suppress(OSError, AttributeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not held
        self.start = self._read_held()
        self.most = 0

    def record_peak(self) -> None:
        """Update the maximum; call it where most is held, between a forward and its backward."""
        self.most = max(self.most, self._read_held() - self.start)

    def _read_held(self) -> int:
        if self.cuda:
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm", "rb") as file:
            resident, shared = file.read().split()[1:3]
        return (int(resident) - int(shared)) * PAGE


def reset_peak_memory(device: torch.device) -> None:
    """Reset the maximum that `read_peak_memory` returns, where the system can (Linux: proc_pid_clear_refs(5))."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def read_peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held: of tensors on a GPU, else of everything in it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_peak_memory(held: Mapping[str, int], device: torch.device) -> str:
    """Return in words what `read_peak_memory` gave by rank or device, in MB (1e6 bytes)."""
    return (
        f"{format_megabytes(held)}of {'tensors' if device.type == 'cuda' else 'the whole process, libraries included'}"
    )


def format_megabytes(held: Mapping[str, int]) -> str:
    """Return bytes by rank or device in words, as in "rank 0: 12.1 MB  rank 1: 8.0 MB  "."""
    return "".join(f"{name}: {number / 1e6:,.1f} MB  " for name, number in held.items())


def report_state_bytes(optimizer: Optimizer, world: World) -> Facts:
    """Report the bytes of parameters, gradients and optimizer state that each rank holds. All ranks call it.

    Beside them stands what each rank would hold if nothing were sharded, as with DDP.
    """
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    held = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [value for value in state if isinstance(value, Tensor)],
    }
    local = {name: sum(get_own_shard(tensor).nbytes for tensor in tensors) for name, tensors in held.items()}
    full = sum(tensor.nbytes for tensors in held.values() for tensor in tensors)
    ranks = world.gather(local)
    if not ranks:
        return Facts()
    totals = {f"rank {rank}": sum(own.values()) for rank, own in enumerate(ranks)}
    words = format_megabytes(totals) + "of parameters, gradients and optimizer state"
    words += f"; with ddp {full / 1e6:,.1f} MB each" if full > max(totals.values()) else ""
    by_kind = {name: [own[name] for own in ranks] for name in held}
    return Facts({"training state": words}, measured={"state_bytes": by_kind, "unsharded_state_bytes": full})


def get_own_shard(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank holds: all of it, unless it is a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def limit_memory(megabytes: int, devices: Sequence[torch.device]) -> Iterator[dict[str, int]]:
    """Limit this process, within the block, to so many MB (1e6 bytes) more than it holds now; 0 is no limit.

    On GPUs this limits tensors; on CPUs writable address space, without malloc's 64 MB a thread. Yields bytes by
    device, filled in after the block: the peak on a GPU, the value at the end on a CPU, beyond those at the start.
    Raises UserError where the limit is too low.
    """
    before, taken = resource.getrlimit(resource.RLIMIT_DATA), dict[str, int]()
    start = {device: read_limited_bytes(device) for device in devices}
    try:
        for gpu in {device for device in devices if device.type == "cuda" and megabytes}:
            everything = torch.cuda.get_device_properties(gpu).total_memory
            wanted = torch.cuda.memory_reserved(gpu) + megabytes * 1e6
            torch.cuda.set_per_process_memory_fraction(min(1.0, wanted / everything), gpu)
        if megabytes and any(device.type == "cpu" for device in devices):
            resource.setrlimit(resource.RLIMIT_DATA, (read_writable_bytes() + megabytes * 1_000_000, before[1]))
        yield taken
        taken |= {str(device): read_limited_bytes(device) - bytes for device, bytes in start.items()}
    except (MemoryError, RuntimeError) as error:
        is_full = isinstance(error, MemoryError) or any(words in str(error) for words in FULL)
        if not megabytes or not is_full:
            raise
        restore_limit(devices, before)
        raise UserError(
            f"memory_cap={megabytes}: the model with its gradients, optimizer and activations does not fit into "
            f"{megabytes} MB; split it into more stages (stages=, mode=pipelined), lower batch, or raise memory_cap"
        ) from None
    finally:
        restore_limit(devices, before)


def restore_limit(devices: Sequence[torch.device], before: tuple[int, int]) -> None:
    """Restore the limit on this process from `before`, and remove those on GPUs."""
    resource.setrlimit(resource.RLIMIT_DATA, before)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def read_limited_bytes(device: torch.device) -> int:
    """Return the bytes that `limit_memory` counts: the most that torch has reserved on a GPU, else address space."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else read_writable_bytes()


def read_writable_bytes() -> int:
    """Return the bytes of private address space that this process can write, which RLIMIT_DATA limits."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
