"""`make sweep` runs missing points, and repeats failed ones if requested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.runs.sweeps import (
    DIVERGING_SETTINGS,
    check_failed_point_is_repeated,
    read_cells,
    run_sweep,
    write_grid,
    write_interrupted_sweep,
)


@pytest.mark.drawn
def test_missing_points_are_run_and_failed_points_only_if_requested(tmp_path: Path, cache: Path) -> None:
    """One point is finished, one has failed, and two missing ones run at once; then the failed one is repeated."""
    points = [{"optim.lr": rate} for rate in ("0.01", "100", "0.02", "0.03")]
    file = write_grid(tmp_path, cache, points=points, settings=DIVERGING_SETTINGS, parallel="2")
    runs = write_interrupted_sweep(tmp_path, points, "finished", "failed")
    completed = run_sweep(file, real_process=True)
    summary = "4 points of mnist_pipeline (1 finished, 1 failed, 2 missing); 2 to run now"
    assert summary in completed.stdout, completed.stdout
    assert [cell["state"] for cell in read_cells(file)] == ["finished", "failed", "finished", "finished"]
    assert [cell["run"] for cell in read_cells(file)][:2] == runs

    first, *_ = check_failed_point_is_repeated(file, runs[1])
    assert first["run"] == runs[0]
    assert len(list((tmp_path / "runs").glob("mnist_pipeline-*"))) == 5

    assert "0 to run now" in run_sweep(file).stdout
