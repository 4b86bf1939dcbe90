"""Checkpoints of two ranks: saving, loading with another number of ranks, and agreement after failures."""

from __future__ import annotations

import errno
import json
import os
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
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.ranks.checkpoint_cases import equals_saved_state
from tests.harness.ranks.programs import check_program
from tests.unit.checkpoint.conftest import RunWithCheckpoints


@dataclass
class TwoRankReports:
    """The reports of two ranks about each case of tests/harness/ranks/checkpoint_cases.py, and their folder."""

    folder: Path
    reports: list[dict[str, Any]]

    def get_results(self, case: str) -> list[Any]:
        """Return the result of each rank, after checking that both ranks reported the same messages."""
        assert self.reports[0][case]["messages"] == self.reports[1][case]["messages"]
        return [report[case]["result"] for report in self.reports]

    def get_messages(self, case: str) -> list[str]:
        return list(self.reports[0][case]["messages"])

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
        run.folder.path.rename(folder / "saved_by_one_rank")
        RunFolder(folder / "saved_by_one_rank").claim_attempt()
        check_program("checkpoint_cases", folder)

    folder = create_folder_once(tmp_path_factory, "checkpoints_of_two_ranks", run_cases)
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return TwoRankReports(folder, reports)


def test_two_ranks_load_their_own_states(two_ranks: TwoRankReports) -> None:
    expected = {"saved": [True, True], "step": 200, "equal": True, "resumes_exactly": True}
    assert two_ranks.get_results("save_and_load") == [expected, expected]


def test_one_rank_loads_the_checkpoint_of_two(two_ranks: TwoRankReports, world: World) -> None:
    messages: list[str] = []
    loaded = two_ranks.load_on_one_rank("save_and_load", world, messages)
    assert equals_saved_state(loaded, None)
    assert loaded.step == 200
    assert loaded.processes == 2
    assert loaded.local is None
    assert not loaded.resumes_exactly
    assert messages[0].startswith("the checkpoint was saved by 2 ranks and is resumed by 1:")
    assert "random states are not" in messages[0]


def test_two_ranks_load_the_checkpoint_of_one(two_ranks: TwoRankReports) -> None:
    assert two_ranks.get_results("saved_by_one_rank") == [{"step": 7, "has_no_local_state": True}] * 2
    message = two_ranks.get_messages("saved_by_one_rank")[0]
    assert message.startswith("the checkpoint was saved by 1 rank and is resumed by 2:")


def test_no_checkpoint_is_saved_if_one_rank_cannot_write(two_ranks: TwoRankReports) -> None:
    names = ["latest", "step-00000001"]
    expected = {
        "saved_with_limit": [False],
        "files_with_limit": names,
        "saved": [True],
        "files": [*names, "step-00000003"],
    }
    assert two_ranks.get_results("rank_1_cannot_write") == [expected, expected]
    warning, recovery = two_ranks.get_messages("rank_1_cannot_write")
    assert "no checkpoint was saved for step 2: rank 1 on " in warning
    assert os.strerror(errno.EFBIG) in warning
    assert recovery == "checkpoint saved after step 3; saving works again"
    assert two_ranks.get_results("rank_0_cannot_create_folder") == [{"saved": [False]}] * 2


def test_ranks_agree_on_a_checkpoint_that_all_can_read(two_ranks: TwoRankReports) -> None:
    """Without agreement, the two ranks would resume from different steps."""
    rank_0, rank_1 = two_ranks.get_results("rank_1_cannot_read_newest")
    assert rank_0 == {"step": 1, "equal": True, "step_without_agreement": 2}
    assert rank_1 == {"step": 1, "equal": True, "step_without_agreement": 1}
    assert " reports: rank-0.pt is missing" in two_ranks.get_messages("rank_1_cannot_read_newest")[0]


def test_a_name_that_two_ranks_save_is_refused(two_ranks: TwoRankReports) -> None:
    for report in two_ranks.get_results("ranks_save_the_same_name"):
        assert "(duplicate names: 1)" in report["error"]
        assert report["files"] == []


def test_sharded_parameters_are_resumed_and_saved_as_full_tensors(two_ranks: TwoRankReports, world: World) -> None:
    rank_0, rank_1 = two_ranks.get_results("resume_sharded_parameters")
    assert rank_0 == {"equal": True, "sizes": [4, 4]}
    assert rank_1 == {"equal": True, "sizes": [0, 0]}
    loaded = two_ranks.load_on_one_rank("resume_sharded_parameters", world, [])
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    state_dicts.load_tensors(model.named_parameters(), loaded.model)
    assert loaded.optimizer["0.weight"]["exp_avg"].shape == (5, 3)


def test_an_optimizer_state_is_saved_by_the_first_peer_that_has_it(two_ranks: TwoRankReports) -> None:
    """A rank without peers saves all of its states, even if another rank has states with the same names."""
    rank_0, rank_1 = two_ranks.get_results("save_divided_optimizer_state")
    assert rank_0 == [["weight"], ["weight"]]
    assert rank_1 == [["only_on_rank_1"], ["weight", "only_on_rank_1"]]
