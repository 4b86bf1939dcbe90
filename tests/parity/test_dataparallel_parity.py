"""resnet_dataparallel's own ResNet-18, in its full width: ddp with synchronised norms equals one process to 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ddp_parity import KEEP
from tests.harness.parity import differences
from tests.harness.processes import Done, run

# 49 images: six batches of 8, and a last one that leaves the second process without a sample
SET = ("data.name=generated", "data.samples=49", "data.image_size=16")
EXACT = ("model=resnet18", "dtype=float64", "compare=false", "eval_batch=5", "optim.warmup=2", "launch.threads=1")
STEPS = ("batch=8", "steps=8", "epochs=2", "checkpoint.every_steps=8", "checkpoint.every_seconds=0")


def trained(cache: Path, runs: Path, *words: str) -> tuple[Done, dict[str, Any]]:
    """A run, and its losses, saved parameters and buffers, and scores."""
    given = (*SET, *EXACT, *STEPS, f"data.cache={cache}", *words)
    done = run("resnet_dataparallel", *given, runs=runs, timeout=280, **KEEP)
    assert done.status == 0, done.err + done.out
    file = done.folder.attempts()[0].attempt / "checkpoints" / "step-00000008" / "rank-0.pt"
    state = torch.load(file, weights_only=True)["model"]
    scores = {name: done.folder.result[name] for name in ("test_loss", "test_accuracy", "test_samples")}
    return done, {"losses": done.losses, "state": state, "scores": scores}


@pytest.mark.timeout(900)
def test_the_full_resnet_with_synchronised_norms_equals_one_process(cache: Path, tmp_path: Path) -> None:
    _, expected = trained(cache, tmp_path / "single", "strategy=single")
    assert len(expected["losses"]) == 8 and len(expected["state"]) == 122
    assert expected["state"]["bn1.num_batches_tracked"] == 8
    done, synced = trained(cache, tmp_path / "synced", "sync_batchnorm=true")
    assert differences(synced, expected) == []
    assert done.folder.result["last_batch"] == [1, 0] and done.folder.result["devices"] == 2
    assert "the same in all processes: each sees the statistics of the whole batch" in done.out
