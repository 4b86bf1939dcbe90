"""The device of a rank and the backend of its run."""

from __future__ import annotations

import os

import pytest
import torch

from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import choose_device_and_backend
from common.system.errors import UserError
from configs.shared import Launch

MIXED = Launch(mixed=True)
AUTO = Launch(device="auto")
CUDA = Launch(device="cuda")
CPU = Launch(device="cpu")


@pytest.mark.parametrize(
    ("gpus", "settings", "ranks", "expected"),
    [
        (0, MIXED, 2, ("cpu", "gloo")),
        (1, MIXED, 2, ("cpu", "gloo")),  # rank 0 has the GPU
        (2, MIXED, 3, ("cuda:1", "gloo")),
        (0, AUTO, 2, ("cpu", "gloo")),
        (1, AUTO, 2, ("cpu", "gloo")),
        (2, AUTO, 2, ("cuda:1", "nccl")),
        (4, CUDA, 2, ("cuda:1", "nccl")),
        (4, CPU, 2, ("cpu", "gloo")),
    ],
)
def test_rank_1_gets_a_gpu_if_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, gpus: int, settings: Launch, ranks: int, expected: tuple[str, str]
) -> None:
    current_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current_devices.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    rank_info = RankInfo(rank=1, size=ranks, local_rank=1, local_size=ranks)
    device, backend = choose_device_and_backend(rank_info, settings)
    assert isinstance(device, torch.device)
    assert (str(device), backend) == expected
    assert current_devices == ([1] if device.type == "cuda" else [])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0,1,2,3" if device.type == "cuda" else ""), "hidden from CPU ranks"


@pytest.mark.parametrize(("gpus", "message"), [(0, "no GPU is visible"), (1, "this host has 1 GPU for 2 ranks;")])
def test_device_cuda_is_refused_without_a_gpu_per_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rank_info = RankInfo(rank=1, size=2, local_rank=1, local_size=2)
    with pytest.raises(UserError, match=message):
        choose_device_and_backend(rank_info, CUDA)
