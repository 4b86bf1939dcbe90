"""Every schedule and engine equals the unsplit model, in float64, to 1e-9: losses, parameters, evaluation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from common import data, prepare
from common.models import SimpleNN
from tests.harness import parity
from tests.harness.parity import TOLERANCE, differences, normalised, scored, train_in_processes
from tests.harness.processes import run

OWN = [("own", name) for name in ("naive", "gpipe", "1f1b")]
LIBRARY = [("torch", name) for name in ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")]
MISTAKES = ("lose_relu", "lose_microbatch")


def case(engine: str, schedule: str, processes: int, each: int) -> str:
    stages = f"stages={processes * each},stages_per_process={each}"
    return f"engine={engine},schedule={schedule},{stages},microbatches={4 if processes == 4 else 6}"


def cases(processes: int) -> list[str]:
    network = [f"{case('own', s, processes, 2)},transport=network" for s in ("gpipe", "1f1b")]
    return network + [case(e, s, processes, each) for (e, s), each in itertools.product(OWN + LIBRARY, (1, 2))]


@pytest.fixture(scope="module")
def reference(cache: Path) -> dict[str, Any]:
    """The unsplit model trained by a bare loop that shares nothing with the pipeline but data order and model."""
    cfg, _ = parity.settings("mnist_pipeline", "stages=1")
    prepared = prepare.prepare_digits(cache)
    images, labels = normalised(prepared, "train", cfg.data.train_limit)
    torch.manual_seed(1234)
    model = SimpleNN(cfg.width, cfg.depth).double()
    parity.widen(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.optim.lr, momentum=cfg.optim.momentum, nesterov=True)
    losses: list[float] = []
    for step in range(cfg.steps):
        epoch, position = divmod(step, len(images) // cfg.batch)
        rows = data.order(len(images), cfg.seed, epoch)[position * cfg.batch : (position + 1) * cfg.batch]
        for group in optimizer.param_groups:
            group["lr"] = cfg.optim.lr * (1 - step / cfg.steps)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scores = scored(model, *normalised(prepared, "test", cfg.data.test_limit))
    return {"losses": losses, "state": model.state_dict(), "scores": scores}


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_pipelines_equal_the_unsplit_model(
    processes: int, tmp_path: Path, cache: Path, reference: dict[str, Any]
) -> None:
    trained = train_in_processes(tmp_path, cache, processes, cases(processes))
    wrong = {name: differences(result, reference) for name, result in trained.items()}
    assert not {name: found for name, found in wrong.items() if found}
    assert len(trained) == 18 and len(reference["losses"]) == 30
    assert reference["losses"][-1] < 0.9 * reference["losses"][0], "a model that learns nothing proves nothing"


def test_the_check_sees_mistakes(tmp_path: Path, cache: Path, reference: dict[str, Any]) -> None:
    wanted = [f"{mistake},{case('own', 'gpipe', 2, 1)}" for mistake in MISTAKES]
    for name, result in train_in_processes(tmp_path, cache, 2, wanted).items():
        assert any("losses" in difference for difference in differences(result, reference)), name


def test_public_command_equals_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    settings = [f"{name}={value}" for name, value in parity.PIPELINE.items()]
    settings.append(f"data.cache={cache}")
    split = run("mnist_pipeline", *settings, "stages=2", "schedule=1f1b", runs=tmp_path / "split")
    whole = run("mnist_pipeline", *settings, "stages=1", "microbatches=1", runs=tmp_path / "whole")
    assert split.status == whole.status == 0, split.err + whole.err
    assert len(split.losses) == 30
    assert split.losses == pytest.approx(whole.losses, abs=TOLERANCE, rel=0)
    results = [json.loads((done.folder.path / "result.json").read_text()) for done in (split, whole)]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], abs=TOLERANCE, rel=0)
    assert results[0]["test_accuracy"] == results[1]["test_accuracy"]
