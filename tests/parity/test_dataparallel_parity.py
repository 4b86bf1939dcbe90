"""resnet_dataparallel's own ResNet-18, in its full width: ddp with synchronised norms equals one process to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.dataparallel_parity import KEEP, train_run
from tests.harness.reference import differences

FULL = ("model=resnet18", "compare=false")


@pytest.mark.timeout(900)
def test_the_full_resnet_with_synchronised_norms_equals_one_process(cache: Path, tmp_path: Path) -> None:
    _, expected = train_run(cache, tmp_path / "single", 8, *FULL, "strategy=single", **KEEP)
    assert len(expected["losses"]) == 8 and len(expected["state"]) == 122
    assert expected["state"]["bn1.num_batches_tracked"] == 8
    done, synced = train_run(cache, tmp_path / "synced", 8, *FULL, "sync_batchnorm=true", **KEEP)
    assert differences(synced, expected) == []
    assert done.result["last_batch"] == [1, 0] and done.result["devices"] == 2
    assert "the same on all ranks: each sees the statistics of the whole batch" in done.out
