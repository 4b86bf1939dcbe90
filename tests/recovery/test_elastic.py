"""An elastic run that loses ranks has the losses of an undisturbed run of one process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint import storage
from common.runs.folder import RunFolder
from common.techniques.elastic.coordinator import EndReason
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

POINTS = ("begin", "reduction", "reduced", "committed", "updated", "evaluation", "save")
STRIKES = [*itertools.product(range(3), POINTS)]
STEP = {"evaluation": 10, "save": 8}  # an epoch has 10 steps, and every fourth step is saved
THREE = ("processes_per_node=3", "elastic=true")
FOUR = ("processes_per_node=4", "elastic=true")
TrainStruck = Callable[..., RunFolder]


@pytest.fixture
def data(cache: Path) -> str:
    """The setting of the prepared data."""
    return f"data.cache={cache}"


@pytest.fixture
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of one process without faults."""
    return train_on_one_rank(tmp_path_factory, data)


@pytest.fixture
def train_struck(data: str, undisturbed: RunFolder, tmp_path: Path) -> TrainStruck:
    """Train with faults and settings, and check that the run equals the undisturbed one."""
    return lambda faults, *settings: train_and_compare(undisturbed, faults, data, *settings, runs=tmp_path / "runs")


def pick_step(point: str) -> int:
    """Return a random step at which the point is reached. Assertion messages contain it."""
    return STEP.get(point) or create_random(point).randrange(2, 24)


def list_killed_ranks(faults: str) -> list[int]:
    """Return the ranks that are killed, in the order of the faults."""
    return [int(fault.split(":")[1]) for fault in faults.split(",") if fault.endswith(":kill")]


def list_checkpoint_steps(folder: RunFolder) -> list[int]:
    """Return the steps of the checkpoints of a run with one attempt."""
    (attempt,) = folder.list_attempts()
    return [checkpoint.step for checkpoint in storage.list_checkpoints(attempt)]


def scale_and_counter(folder: RunFolder) -> list[tuple[Any, Any]]:
    """Return the loss scale of every row, and the steps since its last change."""
    return [(row.get("scale"), row.get("counter")) for row in folder.read_metrics()]


@pytest.mark.parametrize("rank, point", draw_cases("killed ranks", STRIKES, 4))
def test_each_rank_may_be_killed_at_each_point(rank: int, point: str, train_struck: TrainStruck) -> None:
    fault = f"{point}:{rank}:{pick_step(point)}:kill"
    folder = train_struck(fault, *THREE, "elastic.rejoin=0")
    assert list_world_changes(folder) == [([rank], [])], fault


def test_an_evaluation_is_not_lost_with_a_rank(train_struck: TrainStruck) -> None:
    """The other ranks have read the last batch of an epoch when they notice the loss; data workers read the batches."""
    folder = train_struck("updated:1:10:kill", *THREE, "elastic.rejoin=1", "data.workers=1")
    lost, _ = list_lost_and_joined(folder)
    assert lost == [1]


def test_the_best_model_is_kept_if_a_rank_is_lost_while_it_is_saved(
    data: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Within an epoch, after an epoch, or just before. The other ranks repeat the evaluation and save the model."""
    settings = (data, "evaluate_every=5", "checkpoint.every_steps=0", "checkpoint.best=test_loss", "checkpoint.keep=9")
    undisturbed = train_on_one_rank(tmp_path_factory, *settings)
    faults = "save:1:5:kill,save:2:10:kill,evaluated:3:15:kill"
    folder = train_and_compare(undisturbed, faults, *settings, *FOUR, "elastic.rejoin=0", runs=tmp_path / "runs")
    assert list_lost_and_joined(folder) == ([1, 2, 3], [])
    assert list_checkpoint_steps(folder) == list_checkpoint_steps(undisturbed) == [5, 10, 15, 20, 25]


def test_a_checkpoint_is_saved_a_step_later_if_a_rank_is_lost_while_it_is_saved(train_struck: TrainStruck) -> None:
    settings = ("processes_per_node=2", "elastic=true", "elastic.rejoin=0", "checkpoint.every_steps=8")
    folder = train_struck("save:0:8:kill", *settings, "checkpoint.keep=9")
    assert list_checkpoint_steps(folder) == [9, 16, 24, 25]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_frozen_rank_is_lost_and_rejoins(ranks: int, train_struck: TrainStruck) -> None:
    """Its heartbeats stop; the process is killed, and a new one copies the state of another rank."""
    last_rank = ranks - 1
    step = create_random("the step of a frozen rank").randrange(2, 12)
    faults = f"reduction:{last_rank}:{step}:stop,begin:0:14:join"
    folder = train_struck(faults, f"processes_per_node={ranks}", "elastic=true", "elastic.timeout=0.5")
    # one change contains both if the new process joins while the other ranks connect
    assert list_lost_and_joined(folder) == ([last_rank], [last_rank]), faults


def test_a_new_process_that_freezes_before_its_first_message_does_not_block_the_run(train_struck: TrainStruck) -> None:
    faults = "reduction:1:5:kill,arriving:1:0:stop"
    folder = train_struck(faults, "processes_per_node=2", "elastic=true", "elastic.rejoin=1")
    assert list_lost_and_joined(folder) == ([1], [])


def test_a_lost_rank_rejoins_a_run_with_one_step_per_epoch(
    data: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (data, "data.train_limit=24", "steps=12", "epochs=12")
    undisturbed = train_on_one_rank(tmp_path_factory, *settings)
    elastic = ("processes_per_node=2", "elastic=true")
    faults = "reduction:1:3:kill,begin:0:6:join"
    folder = train_and_compare(undisturbed, faults, *settings, *elastic, runs=tmp_path / "runs")
    assert list_lost_and_joined(folder) == ([1], [1])


def test_a_change_of_ranks_that_cannot_be_written_does_not_end_the_run(
    data: str, undisturbed: RunFolder, tmp_path: Path
) -> None:
    settings = (data, "processes_per_node=2", "elastic=true", "elastic.rejoin=0")
    name = "ddp_multinode+disk_error"
    folder = train_and_compare(undisturbed, "begin:1:9:kill", *settings, runs=tmp_path / "runs", name=name)
    assert list_lost_and_joined(folder) == ([1], [])


def test_all_ranks_are_lost_and_rejoin_one_after_another(
    data: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Crop and dropout of a sample do not depend on its rank. One rank at a time prints the epochs."""
    settings = (data, "data.augment=crop", "dropout=0.3")
    undisturbed = train_on_one_rank(tmp_path_factory, *settings)
    faults = "reduction:1:4:kill,begin:0:8:join,reduced:0:12:kill,begin:1:16:join"
    completed = train_with_faults(faults, *settings, "processes_per_node=2", "elastic=true", runs=tmp_path / "runs")
    assert not find_metric_differences(completed.folder, undisturbed), completed.stderr
    assert list_lost_and_joined(completed.folder) == ([1, 0], [1, 0])
    for epoch in ("1", "2", "2.5"):
        assert completed.stdout.count(f"epoch {epoch} ") == 1, completed.stdout


def test_a_run_whose_state_is_lost_ends_and_is_resumed_from_its_checkpoint(
    data: str, undisturbed: RunFolder, tmp_path: Path
) -> None:
    """The only rank with the state is killed while a new one connects to copy it."""
    faults = "reduction:1:4:kill,begin:0:14:join,forming:0:3:kill"
    completed = train_with_faults(
        faults, data, "processes_per_node=2", "elastic=true", runs=tmp_path / "runs", status=137
    )
    assert EndReason.STATE_LOST.value in completed.stderr, completed.stderr
    assert "RESUME=" in completed.stderr, completed.stderr
    assert EndReason.STATE_LOST.value in completed.folder.result["reason"], completed.folder.result

    resumed = resume_run(ENTRY_BY_NAME["ddp_multinode"], completed.folder)
    assert re.search(r"resumed from step (4|8|12)\b", resumed.stdout), resumed.stderr
    assert not find_metric_differences(completed.folder, undisturbed)
    (change,) = completed.folder.result["measured"]["generations"]
    assert change["attempt"] == 1, "the result keeps the changes of the first attempt"
    assert change["lost"] == [1]
    assert change["joined"] == []


def train_with_and_without_faults(
    name: str, faults: str, settings: Settings, path: Path
) -> tuple[RunFolder, RunFolder]:
    """Train a changed experiment on three ranks with faults and on one rank without; the metrics are equal."""
    undisturbed = train_with_faults("", *settings, "processes_per_node=1", runs=path / "undisturbed", name=name)
    folder = train_and_compare(undisturbed.folder, faults, *settings, *THREE, runs=path / "runs", name=name)
    return folder, undisturbed.folder


@pytest.mark.parametrize("faults", ["reduction:1:5:kill,begin:0:9:join,committed:2:14:kill", "updated:0:6:kill"])
def test_skipped_steps_and_the_loss_scale_equal_those_of_one_process(faults: str, data: str, tmp_path: Path) -> None:
    settings = ("precision=fp32", "accumulate=2", data)
    folder, undisturbed = train_with_and_without_faults("amp_accum+overflow", faults, settings, tmp_path)
    lost, _ = list_lost_and_joined(folder)
    assert lost == list_killed_ranks(faults)
    assert [row["global_step"] for row in undisturbed.read_metrics() if row.get("skipped")] == [5, 6, 14]
    expected = scale_and_counter(undisturbed)
    assert scale_and_counter(folder) == expected
    scales = {scale for scale, _ in expected}
    assert len(scales) > 3, "the scale does not change"


def test_batchnorm_statistics_equal_those_of_one_process(data: str, tmp_path: Path) -> None:
    """The failed step has changed them, so they are restored."""
    settings = (data, "model=resnet18", "sync_batchnorm=true")
    faults = "reduction:1:5:kill,begin:0:9:join,evaluation:2:20:kill"
    folder, _ = train_with_and_without_faults("ddp_multinode+batchnorm", faults, settings, tmp_path)
    lost, _ = list_lost_and_joined(folder)
    assert 2 in lost, "no rank was lost in the evaluation"


FAULTS_OF_SEVERAL_RANKS = [
    "reduction:0:7:kill,reduction:2:7:kill",  # two ranks at once, rank 0 among them
    "reduction:1:5:kill,forming:2:2:kill",  # rank 2 is killed while the others connect, after it read generation 2
    "reduction:1:5:kill,copied:0:2:kill",
    "committed:0:9:kill,updated:3:9:kill",
    "begin:3:3:kill,evaluation:0:20:kill",
]


@pytest.mark.parametrize("faults", FAULTS_OF_SEVERAL_RANKS)
def test_several_ranks_are_lost(faults: str, train_struck: TrainStruck) -> None:
    folder = train_struck(faults, *FOUR, "elastic.rejoin=0")
    lost, _ = list_lost_and_joined(folder)
    assert sorted(lost) == sorted(list_killed_ranks(faults))


@pytest.mark.parametrize("rank, fault_kind", [(0, "kill"), (3, "stop")])
def test_a_rank_that_is_lost_while_the_others_connect_is_the_only_one_lost(
    rank: int, fault_kind: str, train_struck: TrainStruck
) -> None:
    """It has published its address, and nothing interrupts the ranks that wait for its connection."""
    faults = f"reduction:1:5:kill,published:{rank}:2:{fault_kind}"
    folder = train_struck(faults, *FOUR, "elastic.timeout=0.5", "elastic.rejoin=0")
    lost, _ = list_lost_and_joined(folder)
    assert sorted(lost) == sorted([1, rank]), list_world_changes(folder)


def test_a_rank_whose_data_worker_fails_is_the_only_one_lost(data: str, undisturbed: RunFolder, tmp_path: Path) -> None:
    """One rank's worker is killed, another one's is stopped: the others notice when a collective times out."""
    settings = (data, *FOUR, "elastic.timeout=2", "elastic.rejoin=0")
    workers = ("data.workers=1", "data.block=1", "launch.step_timeout=3")
    faults = "begin:1:3:worker-kill,begin:2:12:worker-stop"
    completed = train_with_faults(faults, *settings, *workers, runs=tmp_path / "runs")
    assert not find_metric_differences(completed.folder, undisturbed)
    assert list_lost_and_joined(completed.folder) == ([1, 2], []), list_world_changes(completed.folder)


def test_a_rank_that_is_killed_in_the_middle_of_a_message_is_noticed(tmp_path: Path) -> None:
    """As while a rank copies its state. In a broadcast of gloo, the others would wait until the timeout."""
    completed = execute_program("interrupted_message", tmp_path, timeout=60)
    assert "Connection" in completed.stdout, completed.stdout + completed.stderr
    assert "imed out" not in completed.stdout, completed.stdout + completed.stderr


def test_a_group_with_a_collective_that_never_ends_is_left_at_once(tmp_path: Path) -> None:
    """Destroying the group waits for the collective, which a rank that continues with others must not do."""
    completed = execute_program("unfinished_collective", tmp_path, timeout=60)
    assert completed.stdout == "left the process group\n", completed.stderr


def test_a_rank_whose_collective_never_ends_is_lost_and_rejoins(train_struck: TrainStruck) -> None:
    """As when gloo waits for a message behind one that no rank reads; the heartbeats continue."""
    faults = "reduced:0:5:kill,reduced:1:5:block,begin:2:9:join"
    folder = train_struck(faults, *THREE, "elastic.timeout=0.5")
    lost, joined = list_lost_and_joined(folder)
    assert sorted(lost) == [0, 1], list_world_changes(folder)
    assert 1 in joined, list_world_changes(folder)


def test_too_few_ranks_save_and_are_resumed_with_all(data: str, undisturbed: RunFolder, tmp_path: Path) -> None:
    settings = (data, *THREE, "elastic.min=3", "checkpoint.every_steps=0")
    completed = train_with_faults("reduction:1:9:kill", *settings, runs=tmp_path / "runs", status=75)
    assert [row["global_step"] for row in completed.folder.read_metrics()] == list(range(1, 10))
    resume_run(ENTRY_BY_NAME["ddp_multinode"], completed.folder)
    assert not find_metric_differences(completed.folder, undisturbed)


def test_accumulation_windows_are_repeated(data: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = (data, "accumulate=2", "precision=fp32")
    undisturbed = train_on_one_rank(tmp_path_factory, *settings, name="amp_accum")
    faults = "reduction:0:6:kill"
    folder = train_and_compare(undisturbed, faults, *settings, *THREE, runs=tmp_path / "runs", name="amp_accum")
    bytes_sent = [row["bytes_sent"] for row in folder.read_metrics() if "loss" in row]
    assert min(bytes_sent) == pytest.approx(0.75 * max(bytes_sent), rel=1e-3), "two ranks send less than three ranks"


def test_a_step_that_only_some_ranks_have_taken_is_copied(train_struck: TrainStruck) -> None:
    """Rank 0 loses its connections a second after all have committed: the other ranks have taken the step."""
    faults = "committed:0:9:wait,committed:0:9:fail"
    folder = train_struck(faults, *THREE)
    (change,) = folder.result["measured"]["generations"]
    assert change["lost"] == []
    assert change["joined"] == []
    assert change["step"] == 9


def test_a_step_applied_by_some_ranks_only_leaves_different_models(
    data: str, undisturbed: RunFolder, tmp_path: Path
) -> None:
    settings = (data, *THREE, "checkpoint.every_steps=0")
    faults = "committed:0:9:wait,committed:0:9:fail"
    completed = train_with_faults(faults, *settings, runs=tmp_path / "runs", name="ddp_multinode+local_weights")
    differing = find_metric_differences(completed.folder, undisturbed)
    assert differing[0].startswith("step 10: loss"), differing


@pytest.mark.parametrize("mistake", ["old_mean", "local_shards"])
def test_a_group_of_fewer_ranks_has_another_sum(
    mistake: str, data: str, undisturbed: RunFolder, tmp_path: Path
) -> None:
    """Divided by the number of ranks at the start, or without the samples of the lost rank."""
    name = f"ddp_multinode+{mistake}"
    completed = train_with_faults("begin:1:9:kill", data, *THREE, "elastic.rejoin=0", runs=tmp_path / "runs", name=name)
    differing = find_metric_differences(completed.folder, undisturbed)
    assert differing[0].startswith("step 9: loss"), differing


def test_a_checkpoint_may_take_longer_than_the_timeout(train_struck: TrainStruck) -> None:
    """All wait for rank 1, whose heartbeats continue; a timeout of collectives would declare it lost."""
    faults = "save:1:8:wait,evaluation:0:10:wait"
    folder = train_struck(faults, *THREE, "elastic.timeout=0.4")
    assert "generations" not in folder.result["measured"]
