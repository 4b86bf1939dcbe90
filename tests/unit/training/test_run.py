"""The interface of a run: steps, media and reports, and errors that name the misused call."""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.distributed import HashStore

from common.checkpoint.train_state import TrainState
from common.config import config
from common.data.prepare import PreparedDataset
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.system.causes import Cause
from common.system.errors import RunTakenError, UserError
from common.training.run import Run
from configs.mnist_pipeline import Config
from tests.harness.commands.processes import wait_until
from tests.harness.environment.size_limit import limit_file_size


def test_images_and_histograms_of_any_step_are_written_as_files(run: Run) -> None:
    run.log_image(7, "digit", torch.linspace(0, 1, 6).view(2, 3))
    run.log_image(3, "colours", torch.zeros(3, 4, 5, dtype=torch.uint8))
    run.log_histogram(9, "fc1.weight", torch.tensor([0.0, 0.0, 1.0, float("nan")]))
    folder = run.folder.attempt_folder
    records = [json.loads(line) for line in (folder / "media.jsonl").read_text().splitlines()]
    assert [(record["global_step"], record["name"], record["kind"]) for record in records] == [
        (7, "digit", "image"),
        (3, "colours", "image"),
        (9, "fc1.weight", "histogram"),
    ]
    digit, colours, histogram = (folder / record["file"] for record in records)
    with Image.open(digit) as image:
        assert list(image.tobytes()) == [0, 51, 102, 153, 204, 255]
        assert image.size == (3, 2)
    with Image.open(colours) as image:
        assert image.mode == "RGB"
        assert image.size == (5, 4)
    content = json.loads(histogram.read_text())
    counts = content["counts"]
    assert sum(counts) == 3
    assert counts[0] == 2
    assert counts[-1] == 1
    assert content["edges"][0] == 0
    assert content["edges"][-1] == 1


@pytest.mark.parametrize("name, shape", [("../x", (2, 2)), ("", (2, 2)), ("a/b", (2, 2)), ("ok", (4, 2, 2))])
def test_media_with_an_invalid_name_or_shape_are_refused(name: str, shape: tuple[int, ...], run: Run) -> None:
    with pytest.raises(ValueError, match=r"invalid name|an image must have shape"):
        run.log_image(1, name, torch.zeros(shape))
    assert not (run.folder.attempt_folder / "media.jsonl").exists()


def test_with_nccl_a_hanging_rank_is_reported_before_the_timeout(attempt_folder: RunFolder, tmp_path: Path) -> None:
    """The timeout of NCCL ends the process and does not report which rank is missing."""
    world = World(
        rank=1,
        size=2,
        local_rank=0,
        local_size=1,
        nodes=2,
        launcher="slurm",
        hosts=("a", "b"),
        device=torch.device("cpu"),
        backend="nccl",
        threads=1,
        timeout=timedelta(seconds=2),
        store=HashStore(),
    )
    cfg = config.load_config(Config, ["launch.step_timeout=2"])
    run = Run(cfg, attempt_folder, Ranks(world), PreparedDataset("digits", tmp_path, {}))
    log = attempt_folder.log_file(1)
    wait_until(lambda: "ERROR" in log.read_text(), "the rank is reported", 20)
    run.close()
    message = "after step 0: rank 0 on a did not answer within 2 s; check the log of each unresponsive rank"
    assert message in log.read_text()


def return_scores() -> dict[str, float]:
    """Evaluate nothing."""
    return {"test_loss": 1.0, "test_accuracy": 0.5, "test_samples": 2}


def train(run: Run, last_step: int | None = None) -> None:
    """Train all steps, or leave the loop after one of them."""
    for step in run.steps(return_scores):
        with step:
            step.log(loss=torch.tensor(1.0))
        if step.number == last_step:
            break


def test_a_step_that_fails_does_not_count(run: Run, state: TrainState) -> None:
    with pytest.raises(ValueError, match="wrong"):
        for step in run.steps(return_scores):
            with step:
                step.log(loss=torch.tensor(1.0))
                raise ValueError("wrong")
    assert run.step == 0
    assert run.total == 2
    assert step.number == 1
    assert step.epoch == 0


def test_a_step_counts_when_the_body_of_the_loop_ends(run: Run, state: TrainState) -> None:
    for step in run.steps(return_scores):
        assert run.step == step.number - 1
        step.log(loss=torch.tensor(1.0))
    assert run.step == run.total == 2
    assert run.complete


def test_a_step_whose_error_was_ignored_is_reported(run: Run, state: TrainState) -> None:
    with pytest.raises(RuntimeError, match=r"step 1 failed, but the loop over run\.steps"):
        for step in run.steps(return_scores):
            with contextlib.suppress(ValueError), step:
                raise ValueError("wrong")


def test_a_second_loop_is_refused(run: Run, state: TrainState) -> None:
    for _ in run.steps(return_scores):
        break
    with pytest.raises(RuntimeError, match=r"started a second time, after step 0 of 2; use one loop, and the setting"):
        next(run.steps(return_scores))


def test_a_measurement_requires_a_table(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"would lose the measurements; pass .* run\.repeat\(points, measured=table"):
        run.repeat([1, 2])


def test_a_second_measurement_is_refused(run: Run) -> None:
    run.repeat([1, 2], measured=torch.zeros(2))
    message = r"call either run\.register\(\.\.\.\) or run\.repeat\(\.\.\.\), and only once"
    with pytest.raises(RuntimeError, match=message):
        run.repeat([1, 2], measured=torch.zeros(2))


def test_a_measurement_in_a_run_that_trains_is_refused(run: Run, state: TrainState) -> None:
    with pytest.raises(RuntimeError, match=r"call either run\.register\(\.\.\.\) or run\.repeat"):
        run.repeat([1, 2], measured=torch.zeros(2))


def test_steps_require_a_registered_model(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"call run\.register\(\.\.\.\) before run\.resume\(\) and run\.steps"):
        next(run.steps())


def test_a_report_without_training_is_refused(run: Run) -> None:
    message = r"run\.report\(\) was called after step 0 of 0; call it after the loop .* has finished"
    with pytest.raises(RuntimeError, match=message):
        run.report()
    assert not run.folder.result


def test_a_report_before_the_last_step_is_refused(run: Run, state: TrainState) -> None:
    train(run, last_step=1)
    with pytest.raises(RuntimeError, match=r"run\.report\(\) was called after step 1 of 2"):
        run.report()


def test_the_learning_rate_is_set_before_a_step(run: Run, state: TrainState) -> None:
    assert state.optimizer is not None
    rates = []
    for step in run.steps(return_scores):
        with step:
            assert state.optimizer.param_groups[0]["lr"] == step.rate
            assert state.parts[0].training
            rates.append(step.rate)
        if step.number == 2:
            break
    assert rates == [0.02, 0.01], "the decay is linear"


def test_a_run_that_is_superseded_at_its_end_publishes_nothing(run: Run, state: TrainState) -> None:
    train(run)
    RunFolder(run.folder.path).claim_attempt()
    with pytest.raises(RunTakenError, match=r"was superseded by attempt 2; stopping without saving"):
        run.report()
    assert not run.folder.result
    assert not list(run.folder.path.glob("model.*"))


def test_a_model_that_cannot_be_written_has_a_cause(run: Run, state: TrainState) -> None:
    train(run)
    message = r"cannot write the model of step 2: the file would exceed the size limit \(ulimit -f\); raise the limit"
    with limit_file_size(20_000), pytest.raises(UserError, match=message) as caught:
        run.report()
    assert caught.value.cause is Cause.FILE_TOO_LARGE
    assert not run.folder.result
