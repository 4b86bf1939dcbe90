"""Ten cases of the campaign of tests/harness/elastic/campaign.py, in short runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.elastic.campaign import SHORT_RUN, draw_case, execute_case, list_run_settings
from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.shared_results import run_experiment_once

SEED = "37"
CASES = (4, 17, 27, 30, 47, 56, 60, 65, 74, 78)  # two or three ranks, and faults that come soon


@pytest.mark.parametrize("number", draw_cases("elastic campaign", CASES, 3))
def test_ranks_are_struck_around_joins(
    number: int, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = draw_case(SEED, number, SHORT_RUN)
    settings = list_run_settings(case.name, cache, SHORT_RUN)
    undisturbed = run_experiment_once(
        tmp_path_factory, f"campaign-{case.name}", case.name, *settings, "processes_per_node=1"
    )
    execute_case(case, undisturbed.folder, cache, tmp_path / "runs", SHORT_RUN)
    print(case.format_line())
    assert not case.problem
