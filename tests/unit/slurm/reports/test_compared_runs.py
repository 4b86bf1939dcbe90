"""Values of compared runs: the newest values, and the symbol at the end of a curve."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.compare.metric_curves import MAX_POINTS
from slurm.reports.compared_runs import RunFacts, RunGroup, read_groups
from tests.harness.runs.synthetic_runs import SyntheticRun, write_rows


def test_the_newest_value_of_many_evaluations_is_shown(tmp_path: Path) -> None:
    folder = SyntheticRun("mnist_pipeline", state="running", steps=10).write(tmp_path)
    count = 10 * MAX_POINTS
    rows = []
    for step in range(1, count + 1):
        row = {"global_step": step, "samples": step, "time": float(step)}
        rows.append(row | {"loss": 1.0})
        rows.append(row | {"test_accuracy": step / count})
    write_rows(folder.list_attempts()[-1], rows)
    run = RunFacts.from_folder(folder)
    assert run.table_row["test_accuracy"] == 1
    assert RunGroup([run]).list_metric_values("test_accuracy") == [1]


END_SYMBOLS = {
    "finished finished": "",
    "finished failed": "cross",
    "finished lost": "cross",
    "finished running": "circle",
    "failed running": "circle",
}


@pytest.mark.parametrize("states, symbol", END_SYMBOLS.items())
def test_the_end_symbol_of_a_group_depends_on_all_states(tmp_path: Path, states: str, symbol: str) -> None:
    folders = []
    for number, state in enumerate(states.split()):
        run = SyntheticRun("mnist_pipeline", number, 4, state=state, settings={"seed": str(number)})
        folders.append(run.write(tmp_path))
    (group,) = read_groups(folders, by_seed=True)
    assert group.end_symbol == symbol
