"""Every schedule and engine equals the unsplit model, in float64, to 1e-9: losses, parameters, evaluation."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from configs.pipeline import SCHEDULES, V_SCHEDULES
from tests.harness.commands.processes import run_experiment
from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.method import COMMON_SETTINGS, run_reference
from tests.harness.parity.reference import TOLERANCE, list_differences, list_loss_differences
from tests.harness.parity.stage_cases import MISTAKES, PIPELINE

ENGINES = ["own", "torch"]


def make_case(engine: str, schedule: str, processes: int, stages_per_process: int) -> str:
    if schedule in V_SCHEDULES:
        stages_per_process = 2
    stages = f"stages={processes * stages_per_process},stages_per_process={stages_per_process}"
    microbatches = {2: 6, 3: 6, 4: 4}[processes]
    if schedule == "dualpipev":
        microbatches = max(microbatches, 2 * processes)
    return f"engine={engine},schedule={schedule},{stages},microbatches={microbatches}"


@pytest.mark.parametrize("processes, engine", draw_cases("pipelines", [*itertools.product([2, 3, 4], ENGINES)], 2))
def test_pipelines_equal_the_unsplit_model(processes: int, engine: str, tmp_path: Path, cache: Path) -> None:
    # two ranks cover several stages per rank of torch's engine
    has_two_stages = processes == 2 or (processes == 4 and engine == "own")
    stage_counts = (1, 2) if has_two_stages else (1,)
    cases = []
    for schedule, stages_per_process in itertools.product(SCHEDULES, stage_counts):
        cases.append(make_case(engine, schedule, processes, stages_per_process))
    if engine == "own":
        for schedule in ("gpipe", "1f1b", "zero_bubble", "dualpipev"):
            cases.append(f"{make_case('own', schedule, processes, stage_counts[-1])},transport=network")
    cases = list(dict.fromkeys(cases))  # some schedules have the same number of stages in both cases

    outcomes = train_cases(PIPELINE, tmp_path, cache, processes, cases)
    assert list(outcomes) == cases
    unsplit = run_reference(PIPELINE, cache, "stages=1")
    for case, outcome in outcomes.items():
        assert list_differences(outcome, unsplit) == [], case
    losses = unsplit["losses"]
    assert len(losses) == 14
    assert len(outcomes[cases[0]]["norms"]) == 14
    assert losses[-1] < 0.9 * losses[0], "the comparison requires a model that learns"


@pytest.mark.parametrize("disabled", ["clip=0", "dropout=0"])
def test_the_check_sees_clipping_and_dropout(disabled: str, cache: Path) -> None:
    unsplit = run_reference(PIPELINE, cache, "stages=1")
    assert list_loss_differences(run_reference(PIPELINE, cache, f"stages=1,{disabled}"), unsplit)


def test_the_check_sees_mistakes_of_pipelines(tmp_path: Path, cache: Path) -> None:
    correct_case = make_case("own", "gpipe", 2, 1)
    cases = [f"{mistake},{correct_case}" for mistake in MISTAKES]
    outcomes = train_cases(PIPELINE, tmp_path, cache, 2, cases)
    assert list(outcomes) == cases
    unsplit = run_reference(PIPELINE, cache, "stages=1")
    for case, outcome in outcomes.items():
        assert list_loss_differences(outcome, unsplit), case


def test_public_command_equals_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    settings = (*COMMON_SETTINGS, *PIPELINE.settings, f"data.cache={cache}")
    split = run_experiment("mnist_pipeline", *settings, "stages=2", "schedule=1f1b", runs=tmp_path / "split")
    unsplit = run_experiment("mnist_pipeline", *settings, "stages=1", "microbatches=1", runs=tmp_path / "unsplit")
    assert split.returncode == 0, split.stderr
    assert unsplit.returncode == 0, unsplit.stderr
    assert len(split.losses) == 14
    assert split.losses == pytest.approx(unsplit.losses, abs=TOLERANCE, rel=0)
    assert split.result["test_loss"] == pytest.approx(unsplit.result["test_loss"], abs=TOLERANCE, rel=0)
    assert split.result["test_accuracy"] == unsplit.result["test_accuracy"]
