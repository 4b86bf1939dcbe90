"""Measurement and limitation of the memory that a process uses for training."""

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

from common.system import foreign_text
from common.system.causes import Cause
from common.system.errors import UserError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryMeter:
    """A meter of the growth of this process's memory since the meter was created.

    `peak_bytes` is the maximum in bytes over all calls of `record_peak`. On a CPU, the private memory pages of this
    process are counted, without mapped files. On a GPU, the tensors that PyTorch has allocated are counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cuda":
            with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
                ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the operating system
        self.start = self._read_memory_bytes()
        self.peak_bytes = 0

    def record_peak(self) -> None:
        """Update `peak_bytes` with the current memory.

        Call this method between forward and backward, when most memory is in use.
        """
        self.peak_bytes = max(self.peak_bytes, self._read_memory_bytes() - self.start)

    def _read_memory_bytes(self) -> int:
        """Return the memory in bytes that this process currently uses on the device."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm", "rb") as file:
            resident, shared = file.read().split()[1:3]
        return (int(resident) - int(shared)) * PAGE_BYTES


def reset_peak_memory(device: torch.device) -> None:
    """Reset the maximum that `read_peak_memory` returns, if the system supports a reset.

    For a CPU, the reset uses the file clear_refs of Linux, see proc_pid_clear_refs(5).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak of the resident memory


def read_peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes.

    On a GPU, only tensors are counted. On a CPU, the entire resident memory of the process is counted.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_peak_memory(peaks: Mapping[str, int], device: torch.device) -> str:
    """Format the peak memory of each rank or device in MB (1e6 bytes).

    `peaks` contains the values that `read_peak_memory` has returned.
    """
    scope = "tensors" if device.type == "cuda" else "the whole process, libraries included"
    return f"{format_megabytes(peaks)}of {scope}"


def format_megabytes(sizes: Mapping[str, int]) -> str:
    """Format the bytes of each rank or device in MB (1e6 bytes).

    An example of the result is "rank 0: 12.1 MB  rank 1: 8.0 MB  ", with spaces at the end.
    """
    return "".join(f"{name}: {size / 1e6:,.1f} MB  " for name, size in sizes.items())


def get_local_shard(tensor: Any) -> Tensor:
    """Return the local shard of a DTensor, and any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def limit_memory(megabytes: int, devices: Sequence[torch.device], remedy: str) -> Iterator[dict[str, int]]:
    """Limit the memory that this process may use within the `with` block.

    Within the block, the process may use `megabytes` MB (1e6 bytes) more than at the start; 0 means no limit. On GPUs,
    the memory that PyTorch reserves for tensors is limited. On CPUs, the writable address space is limited, without the
    64 MB that malloc reserves per thread.

    Yields a dict that is filled at the end of the block. The dict then contains the growth of memory on each device
    since the start of the block, in bytes: the peak on a GPU, and the value at the end of the block on a CPU. Raises
    UserError, which includes `remedy`, if the limit is too low.
    """
    old_limits = resource.getrlimit(resource.RLIMIT_DATA)
    bytes_by_device: dict[str, int] = {}
    start = {device: read_limited_bytes(device) for device in devices}
    try:
        for gpu in {device for device in devices if device.type == "cuda" and megabytes}:
            total_bytes = torch.cuda.get_device_properties(gpu).total_memory
            limit = torch.cuda.memory_reserved(gpu) + megabytes * 1e6
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total_bytes), gpu)
        if megabytes and any(device.type == "cpu" for device in devices):
            limits = (read_writable_bytes() + megabytes * 1_000_000, old_limits[1])
            resource.setrlimit(resource.RLIMIT_DATA, limits)
        yield bytes_by_device
        for device, start_bytes in start.items():
            bytes_by_device[str(device)] = read_limited_bytes(device) - start_bytes
    except (MemoryError, RuntimeError) as error:
        if not megabytes or not foreign_text.is_out_of_limited_memory(error):
            raise
        restore_memory_limits(devices, old_limits)
        raise UserError(
            f"memory_cap={megabytes}: the model with its gradients, optimizer state and activations does not fit into "
            f"{megabytes} MB; {remedy}, or raise memory_cap",
            cause=Cause.OUT_OF_MEMORY,
        ) from None
    finally:
        restore_memory_limits(devices, old_limits)


def restore_memory_limits(devices: Sequence[torch.device], old_limits: tuple[int, int]) -> None:
    """Restore the previous memory limits of this process, and remove the limits on GPUs."""
    resource.setrlimit(resource.RLIMIT_DATA, old_limits)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def read_limited_bytes(device: torch.device) -> int:
    """Return the number of bytes that `limit_memory` counts.

    On a GPU, the result is the peak of the memory that PyTorch has reserved. On a CPU, the result is the size of the
    writable address space.
    """
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else read_writable_bytes()


def read_writable_bytes() -> int:
    """Return the size in bytes of the private writable address space, which RLIMIT_DATA limits."""
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024
