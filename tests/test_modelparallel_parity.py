"""Every mode, schedule and engine equals the unsplit ResNet-18 fed the same microbatches, in float64, to 1e-9:
losses, parameters, BatchNorm's statistics and counters, evaluation; trained and evaluated in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from common import data, prepare
from common.models import ResNet
from tests import parity
from tests.test_parity import differences, train

NAME = "resnet_modelparallel"
CUTS = {2: "[layer3_0]", 3: "[layer2_0,layer3_1]", 4: "[layer2_0,layer3_0,layer4_0]"}
TORCH = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def cut(stages: int) -> str:
    return f"stages={stages},split={CUTS[stages]}"


def cases(processes: int) -> list[str]:
    """Those that as many processes train."""
    if processes == 1:
        one = ["mode=single", "mode=single,split_size=12"]
        devices = {count: f"devices=[{','.join(['cpu'] * count)}]" for count in (2, 3)}
        one += [f"mode={mode},{names},{cut(n)}" for n, names in devices.items() for mode in ("naive", "pipelined")]
        return [*one, f"mode=naive,split_size=12,{devices[2]},{cut(2)}"]
    own = [f"mode=naive,{cut(processes)}", f"mode=naive,split_size=12,{cut(processes)}"]
    own += [f"schedule={name},{cut(processes)}" for name in ("gpipe", "1f1b")]
    library = [f"engine=torch,schedule={name},{cut(processes)}" for name in TORCH]
    if processes == 3:
        return own + library
    rings = [f"schedule={name},stages_per_process=2,{cut(4)}" for name in ("gpipe", "interleaved_1f1b", "zero_bubble")]
    return [*own, *library, *rings, f"transport=network,{cut(2)}", "stages=2,split=[relu]", "stages=2,balance=time"]


def reference_of(cache: Path, size: int) -> dict[str, Any]:
    """The unsplit model in a bare loop: microbatches of `size`, one after the other, whose gradients add up."""
    cfg, _ = parity.settings(NAME, "mode=single", **{"data.cache": str(cache)})
    prepared = prepare.prepare(cfg.data)
    mean, std = (torch.tensor(value, dtype=torch.float64).view(3, 1, 1) for value in data.STATISTICS["generated"])

    def part(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.from_numpy(prepared.array(f"{name}_images")).double()
        return (pixels / 255 - mean) / std, torch.from_numpy(prepared.array(f"{name}_labels")).long()

    images, labels = part("train")
    torch.manual_seed(1234)
    model = ResNet("resnet18", (3, 32, 32), 10, width=cfg.width).double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.optim.lr, momentum=cfg.optim.momentum, nesterov=True)
    losses: list[float] = []
    for step in range(cfg.steps):
        epoch, position = divmod(step, len(images) // cfg.batch)
        rows = torch.from_numpy(data.order(len(images), cfg.seed, epoch))[position * cfg.batch :][: cfg.batch]
        for group in optimizer.param_groups:
            group["lr"] = cfg.optim.lr * (1 - step / cfg.steps)
        optimizer.zero_grad()
        total = 0.0
        for piece in rows.split(size):
            loss = F.cross_entropy(model(images[piece]), labels[piece]) * size / cfg.batch
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    images, labels = part("test")
    with torch.no_grad():
        logits = model.eval()(images)
    scores = {
        "test_loss": F.cross_entropy(logits, labels).item(),
        "test_accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "test_samples": len(labels),
    }
    return {"losses": losses, "state": model.state_dict(), "scores": scores}


@pytest.fixture(scope="module")
def references(cache: Path) -> dict[int, dict[str, Any]]:
    return {size: reference_of(cache, size) for size in (3, 12)}


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_mode_equals_the_unsplit_model_fed_the_same_microbatches(
    processes: int, tmp_path: Path, cache: Path, references: dict[int, dict[str, Any]]
) -> None:
    trained = train(tmp_path, cache, processes, cases(processes), NAME)
    wrong = {
        name: differences(result, references[12 if "split_size=12" in name else 3]) for name, result in trained.items()
    }
    assert not {name: found for name, found in wrong.items() if found}
    assert len(trained) == {1: 7, 2: 14, 3: 8}[processes]


def test_microbatches_are_another_training_and_the_check_sees_it(references: dict[int, dict[str, Any]]) -> None:
    """BatchNorm's statistics are a microbatch's; counters count microbatches."""
    three, twelve = references[3], references[12]
    assert three["state"]["bn1.num_batches_tracked"] == 40 and twelve["state"]["bn1.num_batches_tracked"] == 10
    wrong = differences(three, twelve)
    assert any("losses" in words for words in wrong) and any("running_var" in words for words in wrong)
