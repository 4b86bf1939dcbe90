"""Every schedule and engine equals the unsplit model, in float64, to 1e-9: losses, parameters, evaluation."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.harness import parity
from tests.harness.cases import train_cases
from tests.harness.parity import expected
from tests.harness.processes import run
from tests.harness.reference import TOLERANCE, differences

NAME = "mnist_pipeline"
ENGINES = {
    "own": ("naive", "gpipe", "1f1b"),
    "torch": ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"),
}


def case(engine: str, schedule: str, processes: int, stages_per_process: int) -> str:
    stages = f"stages={processes * stages_per_process},stages_per_process={stages_per_process}"
    return f"engine={engine},schedule={schedule},{stages},microbatches={4 if processes == 4 else 6}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_pipelines_equal_the_unsplit_model(processes: int, engine: str, tmp_path: Path, cache: Path) -> None:
    # stages of each rank; what torch's engine does with several it does with two ranks, too
    stages = (1, 2) if processes == 2 or (processes == 4 and engine == "own") else (1,)
    cases = [
        case(engine, name, processes, stages_per_process)
        for name, stages_per_process in itertools.product(ENGINES[engine], stages)
    ]
    if engine == "own":
        cases += [f"{case('own', name, processes, stages[-1])},transport=network" for name in ("gpipe", "1f1b")]
    trained = train_cases("parity", tmp_path, cache, processes, cases, NAME)
    expected_model = expected(cache, NAME, "stages=1")
    wrong = {name: differences(result, expected_model) for name, result in trained.items()}
    assert not {name: found for name, found in wrong.items() if found}
    assert list(trained) == cases
    assert len(expected_model["losses"]) == 14
    assert expected_model["losses"][-1] < 0.9 * expected_model["losses"][0], (
        "a model that learns nothing proves nothing"
    )


def test_the_check_sees_mistakes_of_pipelines(tmp_path: Path, cache: Path) -> None:
    cases = [f"{mistake},{case('own', 'gpipe', 2, 1)}" for mistake in parity.MISTAKES]
    trained = train_cases("parity", tmp_path, cache, 2, cases, NAME)
    assert list(trained) == cases
    for name, result in trained.items():
        wrong = differences(result, expected(cache, NAME, "stages=1"))
        assert any("losses" in difference for difference in wrong), name


def test_public_command_equals_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    settings = [f"{name}={value}" for name, value in parity.PIPELINE.items()]
    settings.append(f"data.cache={cache}")
    split = run(NAME, *settings, "stages=2", "schedule=1f1b", runs=tmp_path / "split")
    uninterrupted = run(NAME, *settings, "stages=1", "microbatches=1", runs=tmp_path / "uninterrupted")
    assert split.status == 0, split.err
    assert uninterrupted.status == 0, uninterrupted.err
    assert len(split.losses) == 14
    assert split.losses == pytest.approx(uninterrupted.losses, abs=TOLERANCE, rel=0)
    results = [done.result for done in (split, uninterrupted)]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], abs=TOLERANCE, rel=0)
    assert results[0]["test_accuracy"] == results[1]["test_accuracy"]
