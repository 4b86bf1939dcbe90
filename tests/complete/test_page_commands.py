"""The commands of all pages except README.md run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.pages.page_commands import OTHER_PAGE_COMMANDS, check_page_command, write_page_runs

TRAINING_COMMANDS = [command for command in OTHER_PAGE_COMMANDS if command.startswith("python experiments/")]
MAKE_COMMANDS = [command for command in OTHER_PAGE_COMMANDS if command not in TRAINING_COMMANDS]
DRAWN_COMMANDS = draw_cases("training commands of the pages", TRAINING_COMMANDS, 6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page_runs(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("command", [*MAKE_COMMANDS, *DRAWN_COMMANDS])
def test_every_command_runs(command: str, cache: Path, tmp_path: Path, place: Path, runs: Path) -> None:
    check_page_command(command, cache, tmp_path, place, runs)
