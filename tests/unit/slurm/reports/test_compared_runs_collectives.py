"""Values of compared runs that only measure."""

from __future__ import annotations

from pathlib import Path

from slurm.reports.compare import hide_measurement_curves
from slurm.reports.compared_runs import read_groups
from tests.harness.runs.synthetic_runs import SyntheticRun


def test_a_run_whose_curves_are_hidden_keeps_its_duration(tmp_path: Path) -> None:
    measurement = SyntheticRun("collectives", 0, 4).write(tmp_path)
    training = SyntheticRun("mnist_pipeline", 1, 4).write(tmp_path)
    groups = read_groups([measurement, training], by_seed=False)
    assert hide_measurement_curves(groups) == ["collectives"]
    (measured_run,) = groups[0].runs
    assert not measured_run.curves.steps
    assert measured_run.table_row["duration"] > 0
