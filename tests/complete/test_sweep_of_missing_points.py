"""`make sweep` runs missing points, and repeats failed ones if requested."""

from __future__ import annotations

from pathlib import Path

from tests.harness.commands import in_process_calls
from tests.harness.runs.sweeps import (
    DIVERGING_SETTINGS,
    read_cells,
    run_sweep,
    write_grid,
    write_interrupted_sweep,
)


def test_missing_points_are_run_and_failed_points_only_if_requested(tmp_path: Path, cache: Path) -> None:
    """One point is finished, one has failed, and two missing ones run at once; then the failed one is repeated."""
    points = [{"optim.lr": rate} for rate in ("0.01", "100", "0.02", "0.03")]
    file = write_grid(tmp_path, cache, points=points, settings=DIVERGING_SETTINGS, parallel="2")
    runs = write_interrupted_sweep(tmp_path, points, "finished", "failed")
    completed = run_sweep(file, real_process=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    summary = "4 points of mnist_pipeline (1 finished, 1 failed, 2 missing); 2 to run now"
    assert summary in completed.stdout, completed.stdout
    assert [cell["state"] for cell in read_cells(file)] == ["finished", "failed", "finished", "finished"]
    assert [cell["run"] for cell in read_cells(file)][:2] == runs

    repeated = run_sweep(file, "--failed=1")
    assert repeated.returncode == 1, repeated.stdout + repeated.stderr
    assert "1 to run now" in repeated.stdout, repeated.stdout + repeated.stderr
    first, failed, *others = read_cells(file)
    assert failed["state"] == "failed", "the point diverges again"
    assert failed["earlier"] == [runs[1]]
    assert failed["run"] != runs[1]
    assert first["run"] == runs[0]
    assert len(list((tmp_path / "runs").glob("mnist_pipeline-*"))) == 5

    complete = run_sweep(file)
    assert complete.returncode == 0
    assert "0 to run now" in complete.stdout
    compared = in_process_calls.call_verb("compare", f"--runs-folder={tmp_path / 'runs'}", "--sweep=rates", "--json=1")
    assert compared.returncode == 0, compared.stderr
    for cell in (first, failed, *others):
        assert cell["run"] in compared.stdout
