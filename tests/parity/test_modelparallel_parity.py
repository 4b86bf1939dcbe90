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
from tests.harness import parity
from tests.harness.parity import differences, normalised, scored, train_in_processes

NAME = "resnet_modelparallel"
CUTS = {2: "[layer3_0]", 3: "[layer2_0,layer3_1]", 4: "[layer2_0,layer3_0,layer4_0]"}
TORCH = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def cut(stages: int) -> str:
    return f"stages={stages},split={CUTS[stages]}"


def cases(processes: int) -> dict[str, list[str]]:
    """What as many processes train, in one launch each."""
    if processes == 1:
        one = ["mode=single", "mode=single,split_size=8"]
        devices = {count: f"devices=[{','.join(['cpu'] * count)}]" for count in (2, 3)}
        one += [f"mode={mode},{names},{cut(n)}" for n, names in devices.items() for mode in ("naive", "pipelined")]
        return {"devices": [*one, f"mode=naive,split_size=8,{devices[2]},{cut(2)}"]}
    own = [f"mode=naive,{cut(processes)}", f"mode=naive,split_size=8,{cut(processes)}"]
    own += [f"schedule={name},{cut(processes)}" for name in ("gpipe", "1f1b")]
    library = [f"engine=torch,schedule={name},{cut(processes)}" for name in TORCH]
    if processes == 3:
        return {"own": own, "library": library}
    rings = [f"schedule={name},stages_per_process=2,{cut(4)}" for name in ("gpipe", "interleaved_1f1b", "zero_bubble")]
    others = [*rings, f"transport=network,{cut(2)}", "stages=2,split=[relu]", "stages=2,balance=time"]
    return {"own": own, "library": library, "others": others}


def reference_of(cache: Path, size: int) -> dict[str, Any]:
    """The unsplit model in a bare loop: microbatches of `size`, one after the other, whose gradients add up."""
    cfg, _ = parity.settings(NAME, "mode=single", **{"data.cache": str(cache)})
    prepared = prepare.prepare(cfg.data)
    images, labels = normalised(prepared, "train")
    torch.manual_seed(1234)
    model = ResNet("resnet18", (3, 32, 32), 10).double().train()
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
    scores = scored(model, *normalised(prepared, "test"))
    return {"losses": losses, "state": model.state_dict(), "scores": scores}


@pytest.fixture(scope="module")
def references(cache: Path) -> dict[int, dict[str, Any]]:
    return {size: reference_of(cache, size) for size in (2, 8)}


@pytest.mark.parametrize(("processes", "kind"), [(n, kind) for n in (1, 2, 3) for kind in cases(n)])
def test_every_mode_equals_the_unsplit_model_fed_the_same_microbatches(
    processes: int, kind: str, tmp_path: Path, cache: Path, references: dict[int, dict[str, Any]]
) -> None:
    wanted = cases(processes)[kind]
    trained = train_in_processes(tmp_path, cache, processes, wanted, NAME)
    wrong = {
        name: differences(result, references[8 if "split_size=8" in name else 2]) for name, result in trained.items()
    }
    assert not {name: found for name, found in wrong.items() if found}
    assert list(trained) == wanted


def test_microbatches_are_another_training_and_the_check_sees_it(references: dict[int, dict[str, Any]]) -> None:
    """BatchNorm's statistics are a microbatch's; counters count microbatches."""
    two, eight = references[2], references[8]
    assert two["state"]["bn1.num_batches_tracked"] == 40 and eight["state"]["bn1.num_batches_tracked"] == 10
    wrong = differences(two, eight)
    assert any("losses" in words for words in wrong) and any("running_var" in words for words in wrong)
