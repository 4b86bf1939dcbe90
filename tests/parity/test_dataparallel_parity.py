"""The ResNet-18 of resnet_dataparallel in full width: DDP with synchronised norms equals one process to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.parity.dataparallel_cases import train_run
from tests.harness.parity.reference import list_differences

STEPS = 4  # two full batches, a last one without a sample for the second rank, and one of the next epoch
FULL = ("model=resnet18", "compare=false", "data.samples=17", "data.image_size=12")  # its last layer has 2x2 pixels
REGULARIZATION = ("clip=1", "dropout=0.1")


@pytest.mark.drawn
def test_the_full_resnet_with_synchronised_norms_equals_one_process(cache: Path, tmp_path: Path) -> None:
    _, single_process = train_run(cache, tmp_path / "single", STEPS, *FULL, *REGULARIZATION, "strategy=single")
    assert len(single_process["losses"]) == STEPS
    assert len(single_process["state"]) == 122
    assert single_process["state"]["bn1.num_batches_tracked"] == STEPS
    completed, synchronised = train_run(
        cache, tmp_path / "synced", STEPS, *FULL, *REGULARIZATION, "sync_batchnorm=true"
    )
    assert list_differences(synchronised, single_process) == []
    assert completed.result["last_batch"] == [1, 0]
    assert completed.result["devices"] == 2
    assert "the same on all ranks: each rank uses the statistics of the whole batch" in completed.stdout
