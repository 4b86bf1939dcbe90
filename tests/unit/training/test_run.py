"""The interface of a run: values of any names in any step, and misuse that names the call."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed import HashStore

from common.checkpoint.train_state import TrainState
from common.config import config
from common.data.prepare import PreparedDataset, prepare_digits
from common.measure.metrics_log import MetricsLog
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.runs.metrics_writer import MetricsWriter
from common.runs.tracking.wandb_tracker import Tracker
from common.system.causes import Cause
from common.system.errors import RunTakenError, UserError
from common.system.exit_status import EXIT_REFUSED
from common.training.attempt import Attempt, TrainingOutcome
from common.training.run import Run
from configs.mnist_pipeline import Config
from configs.shared import Data, Wandb
from tests.harness import warm
from tests.harness.file_limit import limit_file_size
from tests.harness.logging_ranks import STEPS, Counted
from tests.harness.processes import environment, wait_until


@pytest.mark.parametrize("mode", ["averaged", "0", "1"])
def test_values_that_only_some_steps_have_are_all_written(mode: str, tmp_path: Path) -> None:
    done = warm.execute([sys.executable, "-m", "tests.harness.logging_ranks", str(tmp_path), mode], env=environment())
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    rows = list(RunFolder(path).list_attempts()[0].read_attempt_rows())
    assert [row["global_step"] for row in rows] == list(range(1, STEPS + 1))
    first = {"averaged": 0.5, "0": 0.0, "1": 1.0}[mode]
    assert [row["loss"] for row in rows] == [step + first for step in range(1, STEPS + 1)]
    assert {row["global_step"]: row["rare"] for row in rows if "rare" in row} == {1: 2.0, 11: 22.0, 21: 42.0}
    assert [row["global_step"] for row in rows if "other" in row] == [7, 14, 21]
    assert all(row["other"] is None for row in rows if "other" in row), "JSON has no infinity"
    alone = {5: 7.0} if mode == "averaged" else {}
    assert {row["global_step"]: row["of_rank_1"] for row in rows if "of_rank_1" in row} == alone


def test_an_evaluation_stands_behind_the_steps_that_it_is_about(run: Run, group: None) -> None:
    log = MetricsLog(run.ranks, MetricsWriter(run.folder.metrics_file, print), Counted(), source=0)
    for step in (1, 2, 3):
        log.add_step(step, 0.0, {"loss": torch.tensor(float(step))})
    log.write_values(3, {"test_loss": 0.5})
    rows = list(run.folder.list_attempts()[0].read_attempt_rows())
    assert [(row["global_step"], "test_loss" in row) for row in rows] == [(1, False), (2, False), (3, False), (3, True)]


def test_images_and_histograms_are_files_of_any_step(run: Run) -> None:
    run.log_image(7, "digit", torch.linspace(0, 1, 6).view(2, 3))
    run.log_image(3, "colours", torch.zeros(3, 4, 5, dtype=torch.uint8))
    run.log_histogram(9, "fc1.weight", torch.tensor([0.0, 0.0, 1.0, float("nan")]))
    place = run.folder.attempt_folder
    lines = [json.loads(line) for line in (place / "media.jsonl").read_text().splitlines()]
    assert [(line["global_step"], line["name"], line["kind"]) for line in lines] == [
        (7, "digit", "image"),
        (3, "colours", "image"),
        (9, "fc1.weight", "histogram"),
    ]
    with Image.open(place / lines[0]["file"]) as image:
        assert list(image.tobytes()) == [0, 51, 102, 153, 204, 255] and image.size == (3, 2)
    with Image.open(place / lines[1]["file"]) as image:
        assert image.mode == "RGB" and image.size == (5, 4)
    found = json.loads((place / lines[2]["file"]).read_text())
    assert sum(found["counts"]) == 3 and (found["counts"][0], found["counts"][-1]) == (2, 1)
    assert (found["edges"][0], found["edges"][-1]) == (0, 1)


@pytest.mark.parametrize(("name", "shape"), [("../x", (2, 2)), ("", (2, 2)), ("a/b", (2, 2)), ("ok", (4, 2, 2))])
def test_media_of_a_bad_name_or_shape_are_refused(name: str, shape: tuple[int, ...], run: Run) -> None:
    with pytest.raises(ValueError, match=r"invalid name|an image must have shape"):
        run.log_image(1, name, torch.zeros(shape))
    assert not (run.folder.attempt_folder / "media.jsonl").exists()


def test_a_run_that_was_not_trained_does_not_finish(run: Run) -> None:
    with pytest.raises(
        RuntimeError, match=r"run\.report\(\) was called after step 0 of 0; call it after the loop .* has finished"
    ):
        run.report()
    assert not run.folder.result


def test_on_nccl_a_rank_that_hangs_is_named_before_the_time_is_over(tmp_path: Path) -> None:
    """NCCL's own time-out ends the process without a word on who is missing."""
    folder = RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()
    world = World(
        1,
        2,
        0,
        1,
        2,
        "slurm",
        hosts=("a", "b"),
        device=torch.device("cpu"),
        backend="nccl",
        threads=1,
        timeout=timedelta(seconds=2),
        store=HashStore(),
    )
    run = Run(
        config.load_config(Config, ["launch.step_timeout=2"]),
        folder,
        Ranks(world),
        PreparedDataset("digits", tmp_path, {}),
    )
    wait_until(lambda: "ERROR" in folder.log_file(1).read_text(), "the watch has told", 20)
    run.close()
    assert (
        "after step 0: rank 0 on a did not answer within 2 s; check the log of each unresponsive rank"
        in folder.log_file(1).read_text()
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()
    world = World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    cfg = Config(batch=16, steps=2, data=Data(name="digits"))
    return Run(cfg, folder, Ranks(world), PreparedDataset("digits", tmp_path, {}))


@pytest.fixture
def group() -> Iterator[None]:
    """A real group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def state(run: Run, cache: Path, group: None) -> TrainState:
    run.prepared = prepare_digits(cache)
    model = networks.SimpleNN()
    run.register(model, torch.optim.SGD(model.parameters()), run.batches())
    assert run.state is not None
    return run.state


def no_scores() -> dict[str, float]:
    return {"test_loss": 1.0, "test_accuracy": 0.5, "test_samples": 2}


def test_a_step_that_fails_does_not_count(run: Run, state: TrainState) -> None:
    with pytest.raises(ValueError, match="wrong"):
        for step in run.steps(no_scores):
            with step:
                step.log(loss=torch.tensor(1.0))
                raise ValueError("wrong")
    assert run.step == 0 and (run.total, step.number, step.epoch) == (2, 1, 0)


def test_a_step_counts_when_the_body_of_the_loop_ends(run: Run, state: TrainState) -> None:
    for step in run.steps(no_scores):
        assert run.step == step.number - 1
        step.log(loss=torch.tensor(1.0))
    assert run.step == run.total == 2 and run.complete


def test_a_step_whose_error_was_ignored_is_told(run: Run, state: TrainState) -> None:
    with pytest.raises(RuntimeError, match=r"step 1 failed, but the loop over run\.steps"):
        for step in run.steps(no_scores):
            with contextlib.suppress(ValueError), step:
                raise ValueError("wrong")


def test_a_loop_that_was_left_is_not_started_again(run: Run, state: TrainState) -> None:
    for _ in run.steps(no_scores):
        break
    with pytest.raises(RuntimeError, match=r"started a second time, after step 0 of 2; use one loop, and the setting"):
        next(run.steps(no_scores))


def test_a_measurement_needs_a_table_and_is_the_only_one(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"would lose the measurements; pass .* run\.repeat\(points, measured=table"):
        run.repeat([1, 2])
    run.repeat([1, 2], measured=torch.zeros(2))
    with pytest.raises(
        RuntimeError, match=r"call either run\.register\(\.\.\.\) or run\.repeat\(\.\.\.\), and only once"
    ):
        run.repeat([1, 2], measured=torch.zeros(2))


def test_a_run_that_trains_repeats_no_measurement(run: Run, state: TrainState) -> None:
    with pytest.raises(RuntimeError, match=r"call either run\.register\(\.\.\.\) or run\.repeat"):
        run.repeat([1, 2], measured=torch.zeros(2))


def test_steps_need_a_registered_model(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"call run\.register\(\.\.\.\) before run\.resume\(\) and run\.steps"):
        next(run.steps())


def test_a_run_is_not_finished_before_its_last_step(run: Run, state: TrainState) -> None:
    for step in run.steps(no_scores):
        with step:
            step.log(loss=torch.tensor(1.0))
        break
    with pytest.raises(RuntimeError, match=r"run\.report\(\) was called after step 1 of 2"):
        run.report()


def test_the_learning_rate_is_set_before_a_step(run: Run, state: TrainState) -> None:
    rates = []
    for step in run.steps(no_scores):
        with step:
            assert state.optimizer is not None
            rates.append((step.rate, state.optimizer.param_groups[0]["lr"], state.parts[0].training))
        if step.number == 2:
            break
    assert rates == [(0.02, 0.02, True), (0.01, 0.01, True)], "it falls in a straight line"


def test_a_run_that_is_superseded_at_its_end_publishes_nothing(run: Run, state: TrainState) -> None:
    for step in run.steps(no_scores):
        with step:
            step.log(loss=torch.tensor(1.0))
    RunFolder(run.folder.path).claim_attempt()
    with pytest.raises(RunTakenError, match=r"was superseded by attempt 2; stopping without saving"):
        run.report()
    assert not run.folder.result and not list(run.folder.path.glob("model.*"))


def test_a_model_that_cannot_be_written_has_a_cause(run: Run, state: TrainState) -> None:
    for step in run.steps(no_scores):
        with step:
            step.log(loss=torch.tensor(1.0))
    problem = r"cannot write the model of step 2: the file would exceed the size limit \(ulimit -f\); raise the limit"
    with limit_file_size(20_000), pytest.raises(UserError, match=problem) as caught:
        run.report()
    assert caught.value.cause is Cause.FILE_TOO_LARGE and not run.folder.result


def test_an_attempt_that_is_superseded_at_its_end_only_ends_its_tracking(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It leaves the conversion to the newer attempt, and result and history alone."""
    cfg = dataclasses.replace(run.cfg, wandb=Wandb(mode="offline"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("common.runs.claims.WITHDRAWAL_SECONDS", 0.1)
    tracker = Tracker.start(cfg, run.folder)
    attempt = Attempt(run.folder, run.prepared, is_new=False, tracker=tracker)
    run.folder.claim_attempt()
    capfd.readouterr()
    attempt.record_end(TrainingOutcome(EXIT_REFUSED), cfg, submitted=False)
    assert capfd.readouterr() == ("", "") and not run.folder.result
    assert not (run.folder.attempt_folder / "logs" / "tracker.log").exists(), "nothing was converted"
