"""An elastic run that loses ranks has the losses of one process that nothing disturbs."""

from __future__ import annotations

import itertools
import random
import re
import sys
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.techniques.elastic.coordinator import EndReason
from tests.harness import warm
from tests.harness.chance import draw_cases
from tests.harness.elastic_runs import differences, list_changes, list_lost_and_joined, train, train_alone, train_like
from tests.harness.processes import environment
from tests.harness.registry import BY_NAME
from tests.harness.resuming import resume

POINTS = ("begin", "reduction", "reduced", "committed", "updated", "evaluation", "save")
PLACES = [*itertools.product(range(3), POINTS)]
STEP = {"evaluation": 10, "save": 8}  # an epoch has 10 steps, and every fourth step is saved
THREE = ("processes_per_node=3", "elastic=true")


def pick_step(point: str) -> int:
    """A step at which the point is reached, drawn anew each time; a failure prints it."""
    return STEP.get(point) or random.SystemRandom().randrange(2, 24)


@pytest.mark.parametrize(("rank", "point"), draw_cases("killed ranks", PLACES, 10))
def test_each_rank_may_be_killed_at_each_point(
    rank: int, point: str, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fault = f"{point}:{rank}:{pick_step(point)}:kill"
    undisturbed = train_alone(tmp_path_factory, f"data.cache={cache}")
    settings = (f"data.cache={cache}", *THREE, "elastic.rejoin=0")
    folder = train_like(undisturbed, fault, *settings, runs=tmp_path / "runs")
    assert list_changes(folder) == [([rank], [])], fault


def test_an_evaluation_is_not_lost_with_a_rank(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The others have read an epoch's last batch when they notice; batches come from data workers here."""
    settings = (f"data.cache={cache}", *THREE, "elastic.rejoin=1", "data.workers=1")
    undisturbed = train_alone(tmp_path_factory, f"data.cache={cache}")
    folder = train_like(undisturbed, "updated:1:10:kill", *settings, runs=tmp_path / "runs")
    assert list_lost_and_joined(folder)[0] == [1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_frozen_rank_is_lost_and_comes_back(
    ranks: int, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its heartbeats stop; the process is ended, and a new one copies the state of another rank."""
    fault = f"reduction:{ranks - 1}:{random.SystemRandom().randrange(2, 12)}:stop,begin:0:14:join"
    settings = (f"data.cache={cache}", f"processes_per_node={ranks}", "elastic=true", "elastic.timeout=0.5")
    folder = train_like(train_alone(tmp_path_factory, f"data.cache={cache}"), fault, *settings, runs=tmp_path / "runs")
    # both in one change, if it came while the others connected
    assert list_lost_and_joined(folder) == ([ranks - 1], [ranks - 1]), fault


def test_a_new_process_that_is_frozen_before_its_first_message_does_not_keep_the_run(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (f"data.cache={cache}", "processes_per_node=2", "elastic=true", "elastic.rejoin=1")
    undisturbed = train_alone(tmp_path_factory, f"data.cache={cache}")
    folder = train_like(undisturbed, "reduction:1:5:kill,arriving:1:0:stop", *settings, runs=tmp_path / "runs")
    assert list_lost_and_joined(folder) == ([1], [])


def test_all_ranks_are_lost_and_come_back_one_after_another(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is drawn for a sample, crop and dropout, is the same on another rank. One rank speaks at a time."""
    settings = (f"data.cache={cache}", "data.augment=crop", "dropout=0.3")
    faults = "reduction:1:4:kill,begin:0:8:join,reduced:0:12:kill,begin:1:16:join"
    two = ("processes_per_node=2", "elastic=true")
    completed = train(faults, *settings, *two, runs=tmp_path / "runs")
    assert completed.status == 0, completed.err
    assert not differences(completed.folder, train_alone(tmp_path_factory, *settings)), completed.err
    assert list_lost_and_joined(completed.folder) == ([1, 0], [1, 0])
    assert [completed.out.count(f"epoch {epoch} ") for epoch in ("1", "2", "2.5")] == [1, 1, 1], completed.out


def test_a_run_whose_state_is_lost_ends_and_is_resumed_from_its_checkpoint(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The only rank with the state is killed while a new one connects to copy it."""
    settings = (f"data.cache={cache}", "processes_per_node=2", "elastic=true")
    completed = train("reduction:1:4:kill,begin:0:14:join,forming:0:3:kill", *settings, runs=tmp_path / "runs")
    assert completed.status == 137, completed.err
    assert EndReason.STATE_LOST.value in completed.err, completed.err
    assert "RESUME=" in completed.err, completed.err
    assert EndReason.STATE_LOST.value in completed.folder.result["reason"], completed.folder.result
    again = resume(BY_NAME["ddp_multinode"], completed.folder)
    assert again.returncode == 0, again.stderr
    assert re.search(r"resumed from step (4|8|12)\b", again.stdout), again.stderr
    assert not differences(completed.folder, train_alone(tmp_path_factory, f"data.cache={cache}"))
    (change,) = completed.folder.result["measured"]["generations"]
    assert (change["attempt"], change["lost"], change["joined"]) == (1, [1], []), "what the first attempt went through"


def train_both(name: str, faults: str, settings: tuple[str, ...], path: Path) -> tuple[RunFolder, RunFolder]:
    """A changed experiment on three ranks with `faults`, and on one without, which have the same numbers."""
    undisturbed = train("", *settings, "processes_per_node=1", runs=path / "undisturbed", name=name)
    assert undisturbed.status == 0, undisturbed.err
    return train_like(undisturbed.folder, faults, *settings, *THREE, runs=path / "runs", name=name), undisturbed.folder


@pytest.mark.parametrize("faults", ["reduced:1:5:kill,begin:0:9:join,committed:2:14:kill", "updated:0:6:kill"])
def test_skipped_steps_and_the_scale_are_those_of_one_process(faults: str, cache: Path, tmp_path: Path) -> None:
    settings = ("precision=fp32", "accumulate=2", f"data.cache={cache}")
    folder, undisturbed = train_both("amp_accum+overflow", faults, settings, tmp_path)
    assert [row["global_step"] for row in undisturbed.read_metrics() if row.get("skipped")] == [5, 6, 14]
    scales = [[(row.get("scale"), row.get("counter")) for row in run.read_metrics()] for run in (folder, undisturbed)]
    assert scales[0] == scales[1]
    assert len({scale for scale, _ in scales[1]}) > 3, "a scale that changes"


def test_statistics_of_batchnorm_are_those_of_one_process(cache: Path, tmp_path: Path) -> None:
    """They have changed by the failed step already, and are set back."""
    settings = (f"data.cache={cache}", "model=resnet18", "sync_batchnorm=true")
    faults = "reduction:1:5:kill,begin:0:9:join,evaluation:2:20:kill"
    folder, _ = train_both("ddp_multinode+batchnorm", faults, settings, tmp_path)
    assert 2 in list_lost_and_joined(folder)[0], "in the evaluation, too"


@pytest.mark.parametrize(
    "faults",
    [
        "reduction:0:7:kill,reduction:2:7:kill",  # two at once, rank 0 among them
        "reduction:1:5:kill,forming:2:2:kill",  # one while the others connect; it has read the number 2 by then
        "reduction:1:5:kill,copied:0:2:kill",
        "committed:0:9:kill,updated:3:9:kill",
        "begin:3:3:kill,evaluation:0:20:kill",
    ],
)
def test_several_are_lost(faults: str, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = ("processes_per_node=4", "elastic=true", "elastic.rejoin=0")
    undisturbed = train_alone(tmp_path_factory, f"data.cache={cache}")
    folder = train_like(undisturbed, faults, f"data.cache={cache}", *settings, runs=tmp_path / "runs")
    assert sorted(list_lost_and_joined(folder)[0]) == sorted(int(fault.split(":")[1]) for fault in faults.split(","))


@pytest.mark.parametrize(("rank", "fault_kind"), [(0, "kill"), (3, "stop")])
def test_a_rank_that_is_lost_while_the_others_connect_takes_none_along(
    rank: int, fault_kind: str, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It has published its address, and nothing wakes those that wait for its connection."""
    settings = (
        f"data.cache={cache}",
        "processes_per_node=4",
        "elastic=true",
        "elastic.timeout=0.5",
        "elastic.rejoin=0",
    )
    fault = f"reduction:1:5:kill,published:{rank}:2:{fault_kind}"
    folder = train_like(train_alone(tmp_path_factory, f"data.cache={cache}"), fault, *settings, runs=tmp_path / "runs")
    assert sorted(list_lost_and_joined(folder)[0]) == sorted([1, rank]), list_changes(folder)


def test_a_rank_whose_data_worker_fails_is_lost_alone(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One rank's worker is killed, another one's stands still: the others notice by the time limit of a collective."""
    settings = (
        f"data.cache={cache}",
        "processes_per_node=4",
        "elastic=true",
        "elastic.timeout=0.5",
        "elastic.rejoin=0",
    )
    run_settings = ("data.workers=1", "data.block=1", "launch.step_timeout=1")
    faults = "begin:1:3:worker-kill,begin:2:12:worker-stop"
    completed = train(faults, *settings, *run_settings, runs=tmp_path / "runs")
    assert completed.status == 0, completed.err
    assert not differences(completed.folder, train_alone(tmp_path_factory, f"data.cache={cache}"))
    assert list_lost_and_joined(completed.folder) == ([1, 2], []), list_changes(completed.folder)


def test_a_rank_that_is_killed_in_the_middle_of_a_message_is_noticed(tmp_path: Path) -> None:
    """As where it copies its state. In a broadcast of gloo, the others would wait until the time-out."""
    completed = warm.execute(
        [sys.executable, "-m", "tests.harness.half_sent", str(tmp_path)], env=environment(), timeout=60
    )
    assert "Connection" in completed.stdout, completed.stdout + completed.stderr
    assert "imed out" not in completed.stdout, completed.stdout + completed.stderr


def test_a_group_with_a_collective_that_never_ends_is_left_at_once(tmp_path: Path) -> None:
    """Freeing it waits for the collective, which a rank that goes on with others must not."""
    completed = warm.execute(
        [sys.executable, "-m", "tests.harness.left_group", str(tmp_path)], env=environment(), timeout=60
    )
    assert completed.stdout == "goes on\n", completed.stderr


def test_a_rank_whose_collective_nothing_ends_is_lost_and_comes_back(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As where gloo waits for a message behind one that nobody reads any more; its heartbeats go on."""
    settings = (f"data.cache={cache}", *THREE, "elastic.timeout=0.5")
    faults = "reduced:0:5:kill,reduced:1:5:block,begin:2:9:join"
    folder = train_like(train_alone(tmp_path_factory, f"data.cache={cache}"), faults, *settings, runs=tmp_path / "runs")
    lost, joined = list_lost_and_joined(folder)
    assert sorted(lost) == [0, 1], list_changes(folder)
    assert 1 in joined, list_changes(folder)


def test_too_few_ranks_save_and_are_resumed_with_all(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (f"data.cache={cache}", *THREE, "elastic.min=3", "checkpoint.every_steps=0")
    completed = train("reduction:1:9:kill", *settings, runs=tmp_path / "runs")
    assert completed.status == 75, completed.err
    undisturbed = train_alone(tmp_path_factory, f"data.cache={cache}")
    assert [row["global_step"] for row in completed.folder.read_metrics()] == list(range(1, 10))
    again = resume(BY_NAME["ddp_multinode"], completed.folder)
    assert again.returncode == 0, again.stderr
    assert not differences(completed.folder, undisturbed)


def test_accumulation_windows_are_done_again(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (f"data.cache={cache}", "accumulate=2", "precision=fp32")
    undisturbed = train_alone(tmp_path_factory, *settings, name="amp_accum")
    train_like(undisturbed, "reduction:0:6:kill", *settings, *THREE, runs=tmp_path / "runs", name="amp_accum")


def test_a_step_that_only_some_ranks_have_taken_is_copied(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rank 0 loses its connections a second after all have come: the others have taken the step."""
    undisturbed = train_alone(tmp_path_factory, f"data.cache={cache}")
    folder = train_like(
        undisturbed, "committed:0:9:wait,committed:0:9:fail", f"data.cache={cache}", *THREE, runs=tmp_path / "runs"
    )
    (change,) = folder.result["measured"]["generations"]
    assert (change["lost"], change["joined"], change["step"]) == ([], [], 9)


def test_a_step_applied_by_some_ranks_only_leaves_different_models(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (f"data.cache={cache}", *THREE, "checkpoint.every_steps=0")
    completed = train(
        "committed:0:9:wait,committed:0:9:fail", *settings, runs=tmp_path / "runs", name="ddp_multinode+own_state"
    )
    assert completed.status == 0, completed.err
    differing = differences(completed.folder, train_alone(tmp_path_factory, f"data.cache={cache}"))
    assert differing, differing
    assert differing[0].startswith("step 10: loss"), differing


@pytest.mark.parametrize("mistake", ["old_mean", "own_shards"])
def test_a_group_of_fewer_ranks_has_another_sum(
    mistake: str, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Divided by the number of ranks at the start, or without the samples of the lost one."""
    settings = (f"data.cache={cache}", *THREE, "elastic.rejoin=0")
    completed = train("begin:1:9:kill", *settings, runs=tmp_path / "runs", name=f"ddp_multinode+{mistake}")
    assert completed.status == 0, completed.err
    differing = differences(completed.folder, train_alone(tmp_path_factory, f"data.cache={cache}"))
    assert differing, differing
    assert differing[0].startswith("step 9: loss"), differing


def test_a_checkpoint_may_take_longer_than_the_timeout(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All wait for rank 1, whose heartbeats go on; with a time-out of collectives it would be lost."""
    settings = (f"data.cache={cache}", *THREE, "elastic.timeout=0.4")
    undisturbed = train_alone(tmp_path_factory, f"data.cache={cache}")
    folder = train_like(undisturbed, "save:1:8:wait,evaluation:0:10:wait", *settings, runs=tmp_path / "runs")
    assert "generations" not in folder.result["measured"]
