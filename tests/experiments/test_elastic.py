"""An elastic run goes on without a rank that is killed; tests/recovery/test_elastic.py has the other cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.elastic_runs import differences, list_changes, train, train_alone


def test_the_losses_are_those_of_one_process_though_rank_0_is_killed(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = ("processes_per_node=3", "elastic=true", "elastic.rejoin=0")
    done = train("reduction:0:7:kill", f"data.cache={cache}", *words, runs=tmp_path / "runs")
    assert done.status == 0, done.err
    assert not differences(done.folder, train_alone(tmp_path_factory, f"data.cache={cache}"))
    assert list_changes(done.folder) == [([0], [])]
    assert done.result["steps_redone"] == 1
    assert "after step 6: lost rank 0; ranks 1, 2 continued after" in done.out
