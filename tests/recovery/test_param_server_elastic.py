"""A parameter server that loses workers has the losses of one process; a server it cannot lose."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.techniques.elastic.member import STUCK_REASON
from tests.harness import warm
from tests.harness.elastic_runs import differences, list_changes, list_lost_and_joined, train, train_alone, train_like
from tests.harness.processes import environment
from tests.harness.registry import BY_NAME
from tests.harness.resuming import resume

NAME = "param_server"
STEP = {"evaluation": 10, "save": 8}  # an epoch has 10 steps, and every fourth step is saved
THREE = ("processes_per_node=3", "elastic=true")


@pytest.fixture
def settings(cache: Path) -> tuple[str, ...]:
    return (f"data.cache={cache}", "plot=false")


def train_like_one(
    factory: pytest.TempPathFactory, faults: str, settings: tuple[str, ...], *run_settings: str, runs: Path
) -> RunFolder:
    """A run with `faults`, and with `more` settings than the undisturbed one has."""
    return train_like(
        train_alone(factory, *settings, name=NAME), faults, *settings, *run_settings, runs=runs, name=NAME
    )


@pytest.mark.parametrize(
    ("servers", "rank", "point"),
    [
        *((2, 2, point) for point in ("pull", "push", "committed", "evaluation", "save")),
        *((1, rank, point) for rank, point in ((1, "push"), (2, "updated"), (1, "save"))),
    ],
)
def test_each_worker_may_be_killed_at_each_point(
    servers: int,
    rank: int,
    point: str,
    settings: tuple[str, ...],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    fault = f"{point}:{rank}:{STEP.get(point) or random.SystemRandom().randrange(2, 24)}:kill"
    run_settings = (*THREE, f"servers={servers}", "elastic.rejoin=0")
    folder = train_like_one(tmp_path_factory, fault, settings, *run_settings, runs=tmp_path / "runs")
    assert list_changes(folder) == [([rank], [])], fault


def test_frozen_and_killed_workers_are_lost_and_come_back(
    settings: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With Adam, whose state of each shard is its server's; the last two are lost at the same time."""
    faults = "push:3:4:stop,begin:0:9:join,pull:1:13:kill,push:2:13:kill,begin:0:18:join"
    run_settings = ("processes_per_node=4", "servers=1", "elastic=true", "elastic.timeout=0.5")
    adam = (*settings, "optim.name=adam", "optim.lr=0.01")
    folder = train_like_one(tmp_path_factory, faults, adam, *run_settings, runs=tmp_path / "runs")
    lost, joined = list_lost_and_joined(folder)
    assert lost[0] == 3, list_changes(folder)
    assert sorted(lost) == sorted(joined) == [1, 2, 3], list_changes(folder)


def test_a_push_that_only_some_servers_have_is_dropped_there(
    settings: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A worker is killed a second after it has pushed to one of two servers, which has all pushes then."""
    faults = "push to 1:2:9:wait,push to 1:2:9:kill"
    run_settings = (*THREE, "servers=2", "elastic.rejoin=0")
    folder = train_like_one(tmp_path_factory, faults, settings, *run_settings, runs=tmp_path / "runs")
    assert list_changes(folder) == [([2], [])]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_only_some_servers_have_taken_is_taken_by_the_others(
    rank: int, settings: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One server loses its connections a second after all ranks know that all have come."""
    run_settings = (*THREE, "servers=2")
    fault = f"committed:{rank}:9:wait,committed:{rank}:9:fail"
    adam = (*settings, "optim.name=adam", "optim.lr=0.01")
    folder = train_like_one(tmp_path_factory, fault, adam, *run_settings, runs=tmp_path / "runs")
    (change,) = folder.result["measured"]["generations"]
    assert (change["lost"], change["joined"], change["step"]) == ([], [], 9)


@pytest.mark.parametrize(
    ("rank", "faults", "reason"),
    [
        (0, "push:0:11:kill", "was killed by SIGKILL"),
        (1, "push:1:11:stop", "was declared lost: no heartbeat for 0.5 s"),
        (1, "push:2:11:await-block,push:2:11:kill,push:1:11:block", f"ended itself: {STUCK_REASON}"),
    ],
)
def test_a_server_is_not_lost_in_flight_and_the_run_goes_on_from_a_checkpoint(
    rank: int,
    faults: str,
    reason: str,
    settings: tuple[str, ...],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Killed, frozen, or in a collective that does not end once a worker is lost, or before, on a busy machine."""
    run_settings = (*THREE, "servers=2", "elastic.timeout=0.5", "elastic.rejoin=0", "launch.step_timeout=15")
    completed = train(faults, *settings, *run_settings, runs=tmp_path / "runs", name=NAME)
    assert completed.status == 137, completed.err
    assert f"rank {rank} (pid" in completed.err, completed.err
    assert "the run cannot continue" in completed.err, completed.err
    assert reason in completed.err, completed.err
    assert reason in completed.folder.result["reason"], completed.err
    assert [row["global_step"] for row in completed.folder.read_metrics() if "loss" in row][-1] >= 8
    again = resume(BY_NAME[NAME], completed.folder)
    assert again.returncode == 0, again.stderr
    assert "resumed from step 8" in again.stdout, again.stderr
    assert not differences(completed.folder, train_alone(tmp_path_factory, *settings, name=NAME))


@pytest.mark.parametrize("side", ["server", "worker", "sender", "all"])
def test_a_message_that_breaks_off_in_its_middle_is_noticed(side: str, tmp_path: Path) -> None:
    """By who receives and by who sends it; messages time out after 60 s."""
    for number in range(5):  # on a busy machine the message may have come before the signal
        (folder := tmp_path / str(number)).mkdir()
        line = [sys.executable, "-m", "tests.harness.param_server_half_served", side, str(folder)]
        completed = warm.execute(line, env=environment(), timeout=100)
        if completed.stdout != "it came\n":
            break
    assert float(completed.stdout) < 20, completed.stderr
