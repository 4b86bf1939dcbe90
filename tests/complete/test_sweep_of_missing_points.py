"""`make sweep` runs the points that are missing, and failed ones when asked."""

from __future__ import annotations

from pathlib import Path

from tests.harness import inside
from tests.harness.sweeps import DIVERGES, begin, cells, sweep, write


def test_only_what_is_missing_is_run_and_failed_ones_alone(tmp_path: Path, cache: Path) -> None:
    """One point is finished and one failed, two are missing and run at once; then the failed one begins anew."""
    points = [{"optim.lr": rate} for rate in ("0.01", "100", "0.02", "0.03")]
    file = write(tmp_path, cache, points=points, settings=DIVERGES, parallel="2")
    runs = begin(tmp_path, points, "finished", "failed")
    completed = sweep(file, real=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "4 points of mnist_pipeline (1 finished, 1 failed, 2 missing); 2 to run now" in completed.stdout, (
        completed.stdout
    )
    assert [cell["state"] for cell in cells(file)] == ["finished", "failed", "finished", "finished"]
    assert [cell["run"] for cell in cells(file)][:2] == runs
    again = sweep(file, "--failed=1")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "1 to run now" in again.stdout, again.stdout + again.stderr
    first, failed, *others = cells(file)
    assert failed["state"] == "failed"  # the loss is no number, as before
    assert failed["earlier"] == [runs[1]]
    assert failed["run"] != runs[1]
    assert first["run"] == runs[0]
    assert len(list((tmp_path / "runs").glob("mnist_pipeline-*"))) == 5
    nothing = sweep(file)
    assert nothing.returncode == 0
    assert "0 to run now" in nothing.stdout
    compared = inside.run_verb("compare", f"--runs-folder={tmp_path / 'runs'}", "--sweep=rates", "--json=1")
    assert compared.returncode == 0, compared.stderr
    assert all(cell["run"] in compared.stdout for cell in (first, failed, *others))
