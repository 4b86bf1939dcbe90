"""The all-reduce algorithm of an attempt whose ranks SLURM or torchrun has restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.backend.algorithm_choice import find_choice_before_restart, load_or_choose_algorithm
from common.config.changed_settings import CHANGES_FILE, read_last_changes
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder


def claim_attempt(run: Path, starter: str, algorithm: str) -> None:
    """Claim an attempt that uses an algorithm instead of `tree`. An empty algorithm stands for no change."""
    process = {"pid": 1, "pid_started": 1}
    attempt = RunFolder(run).claim_attempt({"process": process, "starter": starter})
    if algorithm:
        (attempt.attempt_folder / CHANGES_FILE).write_text(f'{{"launch.algorithm": ["tree", "{algorithm}"]}}')


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """The folder of a run that was started with the algorithm `tree`."""
    (tmp_path / "config.yaml").write_text("launch:\n  algorithm: tree\n")
    return tmp_path


@pytest.mark.parametrize("chosen, used", [("ring", "ring"), ("", "tree")])
def test_a_restarted_attempt_uses_the_choice_of_the_previous_attempt(
    chosen: str, used: str, run_path: Path, world: World
) -> None:
    """The settings of its launch still contain `auto`. Without a change, the previous attempt has chosen `tree`."""
    claim_attempt(run_path, "slurm job 1", chosen)
    claim_attempt(run_path, "slurm job 1", "auto")
    assert load_or_choose_algorithm(run_path, world) == used
    assert read_last_changes(run_path) == ({"launch.algorithm": ("tree", "ring")} if chosen else {})


def test_another_launch_chooses_its_own_algorithm(run_path: Path) -> None:
    claim_attempt(run_path, "slurm job 1", "auto")
    assert find_choice_before_restart(run_path) is None, "there is no previous attempt"
    claim_attempt(run_path, "slurm job 2", "auto")
    assert find_choice_before_restart(run_path) is None
    for _ in range(2):
        claim_attempt(run_path, "", "auto")  # started without SLURM and torchrun
    assert find_choice_before_restart(run_path) is None
