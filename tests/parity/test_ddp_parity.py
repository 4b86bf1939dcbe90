"""Data parallelism equals one process, in float64, to 1e-9: losses, parameters, buffers, evaluation."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from common import data, models
from configs.ddp_multinode import Config
from tests.harness import ddp_parity
from tests.harness.ddp_parity import KEEP, wrong
from tests.harness.processes import ROOT, environment

DDP = ["strategy=ddp", "gradient_as_bucket_view=false,bucket_mb=25", "static_graph=true", "find_unused_parameters=true"]
MISTAKES = ("sums_losses", "no_communication", "same_share")
SLOW = "slow_rank,steps=25"
HOOKS = [f"communication={name}" for name in ("fp16", "bf16", "powersgd")]
SYNCED, APART = "model=resnet18,sync_batchnorm=true", "model=resnet18"
BRIEF = f"{SYNCED},steps=10"


def rate(cfg: Config, step: int) -> float:
    """Five steps of warm-up, then half a cosine, written down anew."""
    if step < 5:
        return cfg.optim.lr * (step + 1) / 5
    return cfg.optim.lr * 0.5 * (1 + math.cos(math.pi * (step - 5) / (cfg.steps - 5)))


@functools.cache
def reference(cache: Path, case: str, shards: int) -> dict[str, Any]:
    """One process and a bare loop that shares nothing with the experiment but data order and model.

    With several `shards` each is forwarded on its own, with its own BatchNorm buffers; in the end these are averaged.
    """
    cfg, _ = ddp_parity.settings(case)
    prepared = ddp_parity.prepared_for(cfg, str(cache))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in data.STATISTICS[prepared.name])

    def part(name: str, limit: int) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(prepared.array(f"{name}_images")[:limit]).double()
        pixels = pixels if pixels.dim() == 4 else pixels[:, None]
        return (pixels / 255 - mean) / std, torch.from_numpy(prepared.array(f"{name}_labels")[:limit]).long()

    images, labels = part("train", cfg.data.train_limit)
    torch.manual_seed(1234)
    kind = models.ResNet18 if cfg.model == "resnet18" else models.ConvNet
    shape = images.shape[1:] if cfg.model == "resnet18" else (28, 28)
    model: nn.Module = kind(shape, 10).double()
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(shards)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9, nesterov=True)
    losses: list[float] = []
    for step in range(cfg.steps):
        epoch, position = divmod(step, len(images) // cfg.batch)
        rows = data.order(len(images), cfg.seed, epoch)[position * cfg.batch : (position + 1) * cfg.batch]
        logits = [
            functional_call(model, own, (images[piece],))
            for own, piece in zip(buffers, torch.from_numpy(rows).chunk(shards), strict=True)
        ]
        loss = F.cross_entropy(torch.cat(logits), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(cfg, step)
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict() | {
        name: torch.stack([own[name] for own in buffers]).double().mean(0) for name in buffers[0]
    }
    model.load_state_dict(state)
    images, labels = part("test", cfg.data.test_limit)
    with torch.no_grad():
        logits = [model.eval()(images)]
    scores = {
        "test_loss": F.cross_entropy(logits[0], labels).item(),
        "test_accuracy": (logits[0].argmax(1) == labels).double().mean().item(),
        "test_samples": len(labels),
    }
    return {"losses": losses, "state": state, "scores": scores}


def train(folder: Path, cache: Path, processes: int, wanted: list[str]) -> dict[str, Any]:
    """The results of cases with one number of processes, trained in one launch."""
    out = folder / f"results-{processes}.pt"
    script = [sys.executable, "-m", "tests.harness.ddp_parity", str(out), str(cache), str(processes), *wanted]
    done = subprocess.run(script, cwd=ROOT, env=environment(**KEEP), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(torch.load(out, weights_only=True))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """Every ConvNet case of two processes, the right ones and the mistakes."""
    wanted = ["strategy=fsdp", *DDP, *(f"{mistake},clip=0" for mistake in MISTAKES), SLOW, *HOOKS]
    return train(tmp_path_factory.mktemp("two"), cache, 2, wanted)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_convnet_equals_one_process(
    processes: int, tmp_path: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    expected = reference(cache, "model=convnet", 1)
    cases = ["strategy=fsdp", *(DDP if processes == 2 else DDP[:1])]
    shared = request.getfixturevalue("of_two") if processes == 2 else train(tmp_path, cache, processes, cases)
    found = {case: wrong(shared[case], expected) for case in cases}
    assert not {case: differing for case, differing in found.items() if differing}
    assert len(expected["losses"]) == 30
    assert expected["losses"][-1] < 0.9 * expected["losses"][0], "a model that learns nothing proves nothing"


def test_resnet_equals_one_process_with_and_without_synchronised_norms(tmp_path: Path, cache: Path) -> None:
    trained = train(tmp_path, cache, 2, [SYNCED, APART, f"{BRIEF},strategy=fsdp"])
    assert wrong(trained[SYNCED], reference(cache, SYNCED, 1)) == []
    assert wrong(trained[f"{BRIEF},strategy=fsdp"], reference(cache, BRIEF, 1)) == []
    assert wrong(trained[APART], reference(cache, APART, 2)) == []
    # the check sees norms that are not synchronised, and buffers before the processes agreed on them
    assert any("losses" in difference for difference in wrong(trained[APART], reference(cache, SYNCED, 1)))
    early = wrong(trained[APART] | {"state": trained[APART]["before"]}, reference(cache, APART, 2))
    assert early and all("running_" in difference for difference in early)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_mistakes(mistake: str, cache: Path, of_two: dict[str, Any]) -> None:
    found = wrong(of_two[f"{mistake},clip=0"], reference(cache, "clip=0", 1))
    assert any("losses" in difference for difference in found)


def test_a_slow_process_is_named(of_two: dict[str, Any]) -> None:
    assert of_two[SLOW]["straggler"] == 1


def test_hooks_lose_only_digits(cache: Path, of_two: dict[str, Any]) -> None:
    expected = torch.tensor(reference(cache, "model=convnet", 1)["losses"], dtype=torch.float64)
    gaps = [(torch.tensor(of_two[hook]["losses"], dtype=torch.float64) - expected).abs() for hook in HOOKS]
    assert all(len(set(of_two[hook]["sums"])) == 1 for hook in HOOKS), "processes hold different models"
    for gap in gaps[:2]:  # rounding that training then makes larger
        assert 1e-9 < gap[:8].max() < 1e-4 and gap.max() < 0.1
    assert gaps[2][:10].max() < 1e-9 < gaps[2].max() < 0.5, "PowerSGD begins after ten steps"
