"""Full and read-only disks at every stage of a run: one clear message, the right exit status, no files left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.bad_input import DISKS, ESSENTIAL, Case, check


@pytest.mark.parametrize("case", [case for case in DISKS if case.name not in ESSENTIAL], ids=lambda case: case.name)
def test_a_run_on_a_full_or_read_only_disk(case: Case, tmp_path: Path, cache: Path) -> None:
    check(case, tmp_path, cache)
