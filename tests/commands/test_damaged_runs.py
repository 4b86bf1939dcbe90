"""Every command that reads runs meets each file of one damaged in one way; in all ways: tests/complete."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.harness.damaged_runs import DAMAGES, FILES, check_commands
from tests.harness.registry import REPLICATED
from tests.harness.shared import Make


@pytest.mark.parametrize(("name", "damage"), list(zip(FILES, itertools.cycle(DAMAGES), strict=False)))
def test_commands_that_read_a_damaged_run_say_one_line(name: str, damage: str, finished: Make, tmp_path: Path) -> None:
    check_commands(finished(REPLICATED).folder, name, damage, tmp_path)
