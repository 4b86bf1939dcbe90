"""How much memory a process takes for its training."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

PAGE = os.sysconf("SC_PAGE_SIZE")


class Footprint:
    """The most memory that was held whenever somebody looked, beyond what was held at the start; in bytes.

    On a CPU this process's own pages, files that it maps left out; on a GPU what torch's tensors take there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if not self.cuda:
            with contextlib.suppress(OSError, AttributeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not held
        self.start = self._held()
        self.most = 0

    def look(self) -> None:
        """Worth it where most is held: between a forward and its backward."""
        self.most = max(self.most, self._held() - self.start)

    def _held(self) -> int:
        if self.cuda:
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm", "rb") as file:
            resident, shared = file.read().split()[1:3]
        return (int(resident) - int(shared)) * PAGE
