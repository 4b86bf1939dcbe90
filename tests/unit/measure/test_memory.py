"""The peak memory of a process."""

from __future__ import annotations

import torch

from common.measure.memory import read_peak_memory, reset_peak_memory
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.ranks.folder_rendezvous import fork

TENSOR_BYTES = 300_000_000


def test_the_peak_memory_can_be_reset() -> None:
    def check_peak() -> None:
        cpu = torch.device("cpu")
        before = read_peak_memory(cpu)
        tensor = torch.ones(TENSOR_BYTES, dtype=torch.uint8)
        assert read_peak_memory(cpu) > before + 0.9 * TENSOR_BYTES
        del tensor
        reset_peak_memory(cpu)
        assert read_peak_memory(cpu) < before + 0.1 * TENSOR_BYTES

    child = fork(check_peak)  # the peak of a new process is its current memory
    child.join(WAIT_TIMEOUT)
    assert child.exitcode == 0
