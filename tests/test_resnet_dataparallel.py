"""The strategies of resnet_dataparallel: equal to one process, and honest where there is only one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import Done, run
from tests.test_ddp_parity import KEEP
from tests.test_parity import differences

# 49 images: six batches of 8, and a last one that leaves the second process without a sample
PARITY = ("data.name=generated", "data.samples=49", "data.image_size=32", "batch=8", "steps=10", "epochs=2")
EXACT = ("dtype=float64", "compare=false", "checkpoint.every_steps=10", "eval_batch=5", "optim.warmup=2")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sets")


def trained(sets: Path, runs: Path, *words: str) -> Done:
    done = run("resnet_dataparallel", *PARITY, *EXACT, f"data.cache={sets}", *words, runs=runs, **KEEP)
    assert done.status == 0, done.err + done.out
    return done


def found(done: Done) -> dict[str, Any]:
    """Losses, saved parameters and buffers, and scores."""
    names = ("test_loss", "test_accuracy", "test_samples")
    file = done.folder.attempts()[0].attempt / "checkpoints" / "step-00000010" / "rank-0.pt"
    saved = torch.load(file, weights_only=True)["model"]
    return {"losses": done.losses, "state": saved, "scores": {name: done.folder.result[name] for name in names}}


@pytest.fixture(scope="module")
def single(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    return trained(sets, tmp_path_factory.mktemp("single"), "strategy=single")


def test_ddp_with_synchronised_norms_equals_one_process(single: Done, sets: Path, tmp_path: Path) -> None:
    expected = found(single)
    assert len(expected["losses"]) == 10 and len(expected["state"]) == 122
    assert expected["state"]["bn1.num_batches_tracked"] == 10
    synced = trained(sets, tmp_path / "synced", "sync_batchnorm=true")
    assert differences(found(synced), expected) == []
    assert synced.folder.result["last_batch"] == [1, 0] and synced.folder.result["devices"] == 2
    # the check sees norms that look at their own share only, with a process that has none
    apart = trained(sets, tmp_path / "apart")
    assert any("losses" in difference for difference in differences(found(apart), expected))
    assert all(value.isfinite().all() for value in found(apart)["state"].values())


@pytest.mark.parametrize("functional", ["true", "false"])
def test_data_parallel_on_one_device_says_so(functional: str, single: Done, sets: Path, tmp_path: Path) -> None:
    done = trained(sets, tmp_path, "strategy=data_parallel", f"functional={functional}", "compare=true")
    result = done.folder.result
    if torch.cuda.device_count() < 2:
        assert "only calls the model, as single does" in done.out and "use strategy=ddp" in done.out
        assert result["devices"] == 1 and "efficiency" not in result and not result["compare"]
        assert "speed-up" not in done.out
        assert found(done)["losses"] == found(single)["losses"]
    assert found(done)["state"].keys() == found(single)["state"].keys()
