"""The executor apart from any experiment: activations in pieces, BatchNorm, and devices it cannot have here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import choose_device_and_backend
from common.system.errors import UserError
from configs.shared import Launch
from tests.harness import warm
from tests.harness.processes import environment, run


def test_pieces_in_memory_and_batchnorm_equal_one_process() -> None:
    """Gradients, running statistics and evaluation, for every engine and schedule."""
    done = warm.execute([sys.executable, "-m", "tests.harness.pieces"], env=environment())
    assert done.returncode == 0, done.stderr


def test_the_drawing_of_a_step_names_model_batch_ranks_and_schedule(tmp_path: Path, digits: tuple[str, ...]) -> None:
    done = run("mnist_pipeline", *digits, "plot=true", "steps=3", "batch=16", "schedule=1f1b", runs=tmp_path)
    model, schedule = "SimpleNN (width 128, depth 2), batch 16", "1f1b (built-in engine), 2 stages, 4 microbatches"
    assert Image.open(done.folder.path / "timeline.png").info["Title"] == f"one step of {model}, 2 ranks: {schedule}"


@pytest.mark.parametrize(
    ("gpus", "asked", "processes", "expected"),
    [
        (0, "mixed", 2, ("cpu", "gloo")),
        (1, "mixed", 2, ("cpu", "gloo")),  # rank 0 has the GPU
        (2, "mixed", 3, ("cuda:1", "gloo")),
        (0, "auto", 2, ("cpu", "gloo")),
        (1, "auto", 2, ("cpu", "gloo")),
        (2, "auto", 2, ("cuda:1", "nccl")),
        (4, "cuda", 2, ("cuda:1", "nccl")),
        (4, "cpu", 2, ("cpu", "gloo")),
        (0, "cuda", 2, "no GPU is visible"),
        (1, "cuda", 2, "this host has 1 GPU for 2 ranks;"),
    ],
)
def test_a_gpu_each_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, processes: int, expected: tuple[str, str] | str
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    place = RankInfo(rank=1, size=processes, local_rank=1, local_size=processes)
    settings = Launch(mixed=True) if asked == "mixed" else Launch(device=asked)  # type: ignore[arg-type]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            choose_device_and_backend(place, settings)
        return
    device, backend = choose_device_and_backend(place, settings)
    assert (str(device), backend) == expected
    assert taken == ([1] if device.type == "cuda" else [])
    assert isinstance(device, torch.device)
