"""Every command that reads runs is executed on damaged files, and on configurations with bad values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.commands.bad_input import BAD_CONFIG_LINES
from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.damaged_runs import DAMAGES, RUN_FILES, check_all_commands, check_commands_on_damaged_run
from tests.harness.runs.synthetic_runs import SyntheticRun

IN_QUICK_TESTS = list(zip(RUN_FILES, itertools.cycle(DAMAGES), strict=False))  # tests/commands/test_damaged_runs.py
REMAINING = [pair for pair in itertools.product(RUN_FILES, DAMAGES) if pair not in IN_QUICK_TESTS]


@pytest.mark.parametrize("name, damage", draw_cases("damaged files", REMAINING, 12))
def test_each_damage_is_reported_in_one_line(name: str, damage: str, finished: GetRun, tmp_path: Path) -> None:
    check_commands_on_damaged_run(finished(REPLICATED_ENTRY).folder, name, damage, tmp_path)


@pytest.mark.parametrize("word", draw_cases("bad values", BAD_CONFIG_LINES, 6), ids=lambda word: word[:30])
def test_a_bad_value_in_the_configuration_of_a_run(word: str, tmp_path: Path) -> None:
    """Every command that reads runs reads it."""
    folder = SyntheticRun("mnist_pipeline", 0, 20).write(tmp_path / "runs")
    file = folder.path / "config.yaml"
    key, _, value = word.partition("=")
    if value or "=" in word:
        tree: dict[str, Any] = yaml.safe_load(file.read_text())
        branch = tree
        *groups, last = key.split(".")
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = value
        file.write_text(yaml.safe_dump(tree))
    else:
        file.write_text(word)
    check_all_commands(folder.path)
