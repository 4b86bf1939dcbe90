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


def case(engine: str, schedule: str, processes: int, each: int) -> str:
    stages = f"stages={processes * each},stages_per_process={each}"
    return f"engine={engine},schedule={schedule},{stages},microbatches={4 if processes == 4 else 6}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_pipelines_equal_the_unsplit_model(processes: int, engine: str, tmp_path: Path, cache: Path) -> None:
    # stages of each rank; what torch's engine does with several it does with two ranks, too
    stages = (1, 2) if processes == 2 or (processes == 4 and engine == "own") else (1,)
    wanted = [case(engine, name, processes, each) for name, each in itertools.product(ENGINES[engine], stages)]
    if engine == "own":
        wanted += [f"{case('own', name, processes, stages[-1])},transport=network" for name in ("gpipe", "1f1b")]
    trained = train_cases("parity", tmp_path, cache, processes, wanted, NAME)
    right = expected(cache, NAME, "stages=1")
    wrong = {name: differences(result, right) for name, result in trained.items()}
    assert not {name: found for name, found in wrong.items() if found}
    assert list(trained) == wanted and len(right["losses"]) == 14
    assert right["losses"][-1] < 0.9 * right["losses"][0], "a model that learns nothing proves nothing"


def test_the_check_sees_mistakes_of_pipelines(tmp_path: Path, cache: Path) -> None:
    wanted = [f"{mistake},{case('own', 'gpipe', 2, 1)}" for mistake in parity.MISTAKES]
    trained = train_cases("parity", tmp_path, cache, 2, wanted, NAME)
    assert list(trained) == wanted
    for name, result in trained.items():
        wrong = differences(result, expected(cache, NAME, "stages=1"))
        assert any("losses" in difference for difference in wrong), name


def test_public_command_equals_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    settings = [f"{name}={value}" for name, value in parity.PIPELINE.items()]
    settings.append(f"data.cache={cache}")
    split = run(NAME, *settings, "stages=2", "schedule=1f1b", runs=tmp_path / "split")
    whole = run(NAME, *settings, "stages=1", "microbatches=1", runs=tmp_path / "whole")
    assert split.status == whole.status == 0, split.err + whole.err
    assert len(split.losses) == 14
    assert split.losses == pytest.approx(whole.losses, abs=TOLERANCE, rel=0)
    results = [done.result for done in (split, whole)]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], abs=TOLERANCE, rel=0)
    assert results[0]["test_accuracy"] == results[1]["test_accuracy"]
