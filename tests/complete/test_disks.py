"""Full and read-only disks at every stage of a run: one clear message, the right exit status, no files left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.bad_input import DISK_CASES, FAST_SUITE_CASE_NAMES, BadInputCase, check_case
from tests.harness.environment.randomness import draw_cases

OTHER_DISK_CASES = [case for case in DISK_CASES if case.name not in FAST_SUITE_CASE_NAMES]


@pytest.mark.parametrize("case", draw_cases("disks", OTHER_DISK_CASES, 2), ids=lambda case: case.name)
def test_a_run_on_a_full_or_read_only_disk(case: BadInputCase, tmp_path: Path, cache: Path) -> None:
    check_case(case, tmp_path, cache)
