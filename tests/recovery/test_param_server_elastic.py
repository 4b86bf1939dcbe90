"""A parameter server that loses workers has the losses of one process; the loss of a server ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.techniques.elastic.member import STUCK_REASON
from tests.harness.commands.processes import Settings
from tests.harness.elastic.faulty_runs import (
    find_metric_differences,
    list_lost_and_joined,
    list_world_changes,
    train_and_compare,
    train_on_one_rank,
    train_with_faults,
)
from tests.harness.environment.randomness import create_random, draw_cases
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.ranks.programs import execute_program
from tests.harness.runs.resuming import resume_run

NAME = "param_server"
STEP = {"evaluation": 10, "save": 8}  # an epoch has 10 steps, and every fourth step is saved
THREE = ("processes_per_node=3", "elastic=true")
ADAM = ("optim.name=adam", "optim.lr=0.01")
TrainStruck = Callable[..., RunFolder]
KILLED_WORKERS = [
    (2, 2, "pull"),
    (2, 2, "push"),
    (2, 2, "committed"),
    (2, 2, "evaluation"),
    (2, 2, "save"),
    (1, 1, "push"),
    (1, 2, "updated"),
    (1, 1, "save"),
]


@pytest.fixture
def settings(cache: Path) -> Settings:
    return (f"data.cache={cache}", "plot=false")


@pytest.fixture
def train_struck(settings: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainStruck:
    """Train with faults and elastic settings, and check that the run equals an undisturbed one without them."""

    def train_with_faults(faults: str, *elastic_settings: str, common: Settings = ()) -> RunFolder:
        undisturbed = train_on_one_rank(tmp_path_factory, *settings, *common, name=NAME)
        all_settings = (*settings, *common, *elastic_settings)
        return train_and_compare(undisturbed, faults, *all_settings, runs=tmp_path / "runs", name=NAME)

    return train_with_faults


def pick_step(point: str) -> int:
    """Return a random step at which the point is reached. Assertion messages contain it."""
    return STEP.get(point) or create_random(point).randrange(2, 24)


@pytest.mark.parametrize("servers, rank, point", draw_cases("killed workers", KILLED_WORKERS, 4))
def test_each_worker_may_be_killed_at_each_point(
    servers: int, rank: int, point: str, train_struck: TrainStruck
) -> None:
    fault = f"{point}:{rank}:{pick_step(point)}:kill"
    folder = train_struck(fault, *THREE, f"servers={servers}", "elastic.rejoin=0")
    assert list_world_changes(folder) == [([rank], [])], fault


def test_frozen_and_killed_workers_are_lost_and_rejoin(train_struck: TrainStruck) -> None:
    """With Adam, whose state of each shard is stored by its server; the last two workers are lost at the same time."""
    faults = "push:3:4:stop,begin:0:9:join,pull:1:13:kill,push:2:13:kill,begin:0:18:join"
    elastic = ("processes_per_node=4", "servers=1", "elastic=true", "elastic.timeout=0.5")
    folder = train_struck(faults, *elastic, common=ADAM)
    lost, joined = list_lost_and_joined(folder)
    assert lost[0] == 3, list_world_changes(folder)
    assert sorted(lost) == [1, 2, 3], list_world_changes(folder)
    assert sorted(joined) == [1, 2, 3], list_world_changes(folder)


def test_a_push_that_only_some_servers_have_is_dropped_there(train_struck: TrainStruck) -> None:
    """A worker is killed a second after it pushed to one of two servers, which then has all pushes."""
    faults = "push to 1:2:9:wait,push to 1:2:9:kill"
    folder = train_struck(faults, *THREE, "servers=2", "elastic.rejoin=0")
    assert list_world_changes(folder) == [([2], [])]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_only_some_servers_have_taken_is_taken_by_the_others(rank: int, train_struck: TrainStruck) -> None:
    """One server loses its connections a second after all ranks know that all pushes have arrived."""
    faults = f"committed:{rank}:9:wait,committed:{rank}:9:fail"
    folder = train_struck(faults, *THREE, "servers=2", common=ADAM)
    (change,) = folder.result["measured"]["generations"]
    assert change["lost"] == []
    assert change["joined"] == []
    assert change["step"] == 9


LOST_SERVERS = [
    (0, "push:0:11:kill", "was killed by SIGKILL"),
    (1, "push:1:11:stop", "was declared lost: no heartbeat for 0.5 s"),
    (1, "push:2:11:await-block,push:2:11:kill,push:1:11:block", f"ended itself: {STUCK_REASON}"),
]


@pytest.mark.parametrize("rank, faults, reason", LOST_SERVERS)
def test_a_lost_server_ends_the_run_which_is_resumed_from_a_checkpoint(
    rank: int, faults: str, reason: str, settings: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed, frozen, or in a collective that does not end after a worker is lost, or before, on a busy machine."""
    elastic = (*THREE, "servers=2", "elastic.timeout=0.5", "elastic.rejoin=0", "launch.step_timeout=15")
    completed = train_with_faults(faults, *settings, *elastic, runs=tmp_path / "runs", name=NAME, status=137)
    assert f"rank {rank} (pid" in completed.stderr, completed.stderr
    assert "the run cannot continue" in completed.stderr, completed.stderr
    assert reason in completed.stderr, completed.stderr
    assert reason in completed.folder.result["reason"], completed.stderr
    steps = [row["global_step"] for row in completed.folder.read_metrics() if "loss" in row]
    assert steps[-1] >= 8

    resumed = resume_run(ENTRY_BY_NAME[NAME], completed.folder)
    assert "resumed from step 8" in resumed.stdout, resumed.stderr
    assert not find_metric_differences(completed.folder, train_on_one_rank(tmp_path_factory, *settings, name=NAME))


@pytest.mark.parametrize("side", ["server", "worker", "sender", "all"])
def test_a_message_that_breaks_off_in_its_middle_is_noticed(side: str, tmp_path: Path) -> None:
    """By its receiver and by its sender; messages time out after 60 s."""
    for number in range(5):  # on a busy machine the message may arrive before the signal
        folder = tmp_path / str(number)
        folder.mkdir()
        completed = execute_program("param_server_interrupted_message", side, folder)
        if completed.stdout != "message arrived\n":
            break
    assert float(completed.stdout) < 20, completed.stderr
