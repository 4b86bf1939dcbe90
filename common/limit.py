"""A limit on what a process may take for its training, to see what a model needs."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from common.config import UserError

FULL = ("not enough memory", "out of memory", "Cannot allocate memory", "std::bad_alloc")  # as libraries say it


@contextlib.contextmanager
def memory_cap(megabytes: int, device: torch.device) -> Iterator[None]:
    """Let this process take so many MB more than it has now, within the block; 0 sets no limit.

    Of tensors on a GPU, else of address space that it can write: malloc reserves 64 MB beside it for each thread, which
    are not counted. Raises UserError where that is too little.
    """
    if not megabytes:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        if device.type == "cuda":
            everything = torch.cuda.get_device_properties(device).total_memory
            now = torch.cuda.memory_reserved(device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, (now + megabytes * 1e6) / everything), device)
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (writable() + megabytes * 1_000_000, before[1]))
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in FULL):
            raise
        lift(device, before)
        raise UserError(
            f"memory_cap={megabytes}: the model with its gradients, optimizer and activations does not fit into "
            f"{megabytes} MB; cut it into more stages (stages=, mode=pipelined), lower batch, or raise memory_cap"
        ) from None
    finally:
        lift(device, before)


def lift(device: torch.device, before: tuple[int, int]) -> None:
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def writable() -> int:
    """Bytes of private address space that this process can write, as the system counts them for its limit."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
