"""An elastic run continues without a killed rank; tests/recovery/test_elastic.py has the other cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.elastic.faulty_runs import (
    find_metric_differences,
    list_world_changes,
    train_on_one_rank,
    train_with_faults,
)


def test_losses_equal_those_of_one_process_after_rank_0_is_killed(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = ("processes_per_node=3", "elastic=true", "elastic.rejoin=0")
    completed = train_with_faults("reduction:0:7:kill", f"data.cache={cache}", *settings, runs=tmp_path / "runs")
    assert not find_metric_differences(completed.folder, train_on_one_rank(tmp_path_factory, f"data.cache={cache}"))
    assert list_world_changes(completed.folder) == [([0], [])]
    assert completed.result["steps_redone"] == 1
    assert "after step 6: lost rank 0; ranks 1, 2 continued after" in completed.stdout
