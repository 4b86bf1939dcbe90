"""Checkpoints of two ranks: saving, loading with another number of ranks, and agreement after failures."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from common.checkpoint import state_dicts
from common.checkpoint.checkpointer import Checkpointer
from common.checkpoint.loading import LoadedCheckpoint
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from configs.shared import Checkpoint
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.ranks.checkpoint_cases import right
from tests.unit.checkpoint.conftest import RunWithCheckpoints


@dataclass
class TwoRankReports:
    """Reports of two real ranks about each case of tests/harness/ranks/checkpoint_cases.py, and the folder of the
    cases.
    """

    folder: Path
    reports: list[dict[str, Any]]

    def get_results(self, case: str) -> list[Any]:
        """Return the result of each rank, after checking that both ranks reported the same messages."""
        assert self.reports[0][case]["said"] == self.reports[1][case]["said"]
        return [report[case]["found"] for report in self.reports]

    def get_messages(self, case: str) -> list[str]:
        return list(self.reports[0][case]["said"])

    def load_on_one_rank(self, case: str, world: World, messages: list[str]) -> LoadedCheckpoint:
        attempt = RunFolder(self.folder / case, 2)
        loaded = Checkpointer(attempt, Ranks(world), Checkpoint(), messages.append).load()
        assert loaded is not None
        return loaded


@pytest.fixture(scope="module")
def two_ranks(world: World, tmp_path_factory: pytest.TempPathFactory) -> TwoRankReports:
    """Run the cases on two ranks, which also load a checkpoint of this process."""

    def run_cases(folder: Path) -> None:
        run = RunWithCheckpoints(world, folder)
        run.save(7)
        run.folder.path.rename(folder / "of_one")
        RunFolder(folder / "of_one").claim_attempt()
        command = [sys.executable, "-m", "tests.harness.ranks.checkpoint_cases", "two", str(folder)]
        process = execution.execute_command(command, env=make_environment())
        assert process.returncode == 0, process.stderr

    folder = create_folder_once(tmp_path_factory, "two", run_cases)
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return TwoRankReports(folder, reports)


def test_two_ranks_load_their_parts(two_ranks: TwoRankReports) -> None:
    expected = {"saved": [True, True], "step": 200, "right": True, "exact": True}
    assert two_ranks.get_results("round_trip") == [expected, expected]


def test_one_rank_loads_the_checkpoint_of_two(two_ranks: TwoRankReports, world: World) -> None:
    messages: list[str] = []
    loaded = two_ranks.load_on_one_rank("round_trip", world, messages)
    assert right(loaded, None)
    assert loaded.step == 200
    assert loaded.processes == 2
    assert loaded.local is None
    assert not loaded.resumes_exactly
    assert messages[0].startswith("the checkpoint was saved by 2 ranks and is resumed by 1:")
    assert "random states are not" in messages[0]


def test_two_ranks_load_the_checkpoint_of_one(two_ranks: TwoRankReports) -> None:
    assert two_ranks.get_results("of_one") == [{"step": 7, "whole": True}] * 2
    message = two_ranks.get_messages("of_one")[0]
    assert message.startswith("the checkpoint was saved by 1 rank and is resumed by 2:")


def test_no_checkpoint_is_saved_if_one_rank_cannot_write(two_ranks: TwoRankReports) -> None:
    names = ["latest", "step-00000001"]
    expected = {"failed": [False], "files": names, "healed": [True], "after": [*names, "step-00000003"]}
    assert two_ranks.get_results("one_rank_cannot_write") == [expected, expected]
    warning, recovery = two_ranks.get_messages("one_rank_cannot_write")
    assert "no checkpoint was saved for step 2: rank 1 on " in warning
    assert os.strerror(errno.EFBIG) in warning
    assert recovery == "checkpoint saved after step 3; saving works again"
    assert two_ranks.get_results("rank_0_cannot_begin") == [{"failed": [False]}] * 2


def test_ranks_agree_on_a_checkpoint_that_all_can_read(two_ranks: TwoRankReports) -> None:
    """Without agreement, the two ranks would resume from different steps."""
    rank_0, rank_1 = two_ranks.get_results("one_rank_sees_less")
    assert rank_0 == {"agreed": 1, "right": True, "parted": 2}
    assert rank_1 == {"agreed": 1, "right": True, "parted": 1}
    assert " reports: rank-0.pt is missing" in two_ranks.get_messages("one_rank_sees_less")[0]


def test_a_name_that_two_ranks_save_is_refused(two_ranks: TwoRankReports) -> None:
    for report in two_ranks.get_results("both_give_a_name"):
        assert "(duplicate names: 1)" in report["error"]
        assert report["files"] == []


def test_sharded_parameters_are_resumed_and_saved_as_full_tensors(two_ranks: TwoRankReports, world: World) -> None:
    rank_0, rank_1 = two_ranks.get_results("sharded")
    assert rank_0 == {"equal": True, "sizes": [4, 4]}
    assert rank_1 == {"equal": True, "sizes": [0, 0]}
    loaded = two_ranks.load_on_one_rank("sharded", world, [])
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    state_dicts.load_tensors(model.named_parameters(), loaded.model)
    assert loaded.optimizer["0.weight"]["exp_avg"].shape == (5, 3)
