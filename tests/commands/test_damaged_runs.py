"""Commands that read a run with a damaged file, each damaged in one way; tests/complete damages them in all ways."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.harness.commands import in_process_calls
from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.damaged_runs import DAMAGES, RUN_FILES, check_commands_on_damaged_run
from tests.harness.runs.synthetic_runs import SyntheticRun


@pytest.mark.parametrize(
    "name, damage", draw_cases("damaged runs", list(zip(RUN_FILES, itertools.cycle(DAMAGES), strict=False)), 5)
)
def test_commands_that_read_a_damaged_run_print_one_line(
    name: str, damage: str, finished: GetRun, tmp_path: Path
) -> None:
    check_commands_on_damaged_run(finished(REPLICATED_ENTRY).folder, name, damage, tmp_path)


def test_a_run_on_an_unknown_host_is_not_cancelled(tmp_path: Path) -> None:
    run = SyntheticRun("mnist_pipeline", 0, 20, state="lost").write(tmp_path / "runs").path
    (run / "meta.json").write_text("{")
    completed = in_process_calls.call_verb("cancel", "--", str(run), status=2)
    assert "meta.json is missing or damaged, so the host of the run is unknown" in completed.stderr
    assert not (run / "result.json").exists()
