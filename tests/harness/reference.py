"""What the experiments are compared with: a bare training loop that shares only data order and models with them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from common.data import loader
from common.data.prepare import PreparedDataset
from configs.shared import Optim

TOLERANCE = 1e-9


def rate(settings: Optim, step: int, steps: int) -> float:
    """The learning rate, written down anew: a warm-up in equal parts, then half a cosine or a straight line to 0."""
    warm = settings.warmup
    if step < warm:
        return settings.lr * (step + 1) / warm
    done = (step - warm) / (steps - warm)
    return settings.lr * (0.5 * (1 + math.cos(math.pi * done)) if settings.decay == "cosine" else 1 - done)


def normalised(prepared: PreparedDataset, part: str, limit: int = 0) -> tuple[Tensor, Tensor]:
    """Images in float64, and labels; all of them, or the first few."""
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in loader.STATISTICS[prepared.name])
    pixels = torch.from_numpy(prepared.map_array(f"{part}_images")[: limit or None]).double()
    pixels = pixels if pixels.dim() == 4 else pixels[:, None]
    return (pixels / 255 - mean) / std, torch.from_numpy(prepared.map_array(f"{part}_labels")[: limit or None]).long()


@torch.no_grad()
def scored(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """What an evaluation should find."""
    logits = model.eval()(images)
    return {
        "test_loss": F.cross_entropy(logits, labels).item(),
        "test_accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "test_samples": len(labels),
    }


def trained(
    cfg: Any,
    model: nn.Module,
    prepared: PreparedDataset,
    *,
    shares: int | tuple[int, ...] = 1,
    piece: int = 0,
    grain: int = 0,
) -> dict[str, Any]:
    """Losses, state and scores of a model in float64, trained in one process by the settings of an experiment.

    Each batch is cut into so many equal `shares`, or such of so many samples, with BatchNorm buffers of their own, and
    these into pieces of so many samples, whose gradients add up; 0 does not cut. After an epoch the shares' buffers are
    averaged by their samples, as an evaluation does. An epoch's rest is a smaller batch of as many multiples of `grain`
    samples as there are; by default of none.
    """
    images, labels = normalised(prepared, "train", cfg.data.train_limit)
    grain, sizes = grain or cfg.batch, (1,) * shares if isinstance(shares, int) else shares
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=cfg.optim.momentum, nesterov=True)
    buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in sizes]
    model.train()
    losses: list[float] = []
    for epoch in itertools.count():
        rows = torch.from_numpy(loader.draw_sample_order(len(images), cfg.seed, epoch))[: len(images) // grain * grain]
        for batch in rows.split(cfg.batch)[: cfg.steps - len(losses)]:
            optimizer.zero_grad()
            total = 0.0
            cut = batch.chunk(shares) if isinstance(shares, int) else batch.split(shares)
            for share, own in zip(cut, buffers, strict=True):
                if not len(share):
                    for name in (name for name in own if name.endswith("num_batches_tracked")):
                        own[name] += 1
                    continue
                for part in share.split(piece or len(share)):
                    logits = functional_call(model, own, (images[part],))
                    loss = F.cross_entropy(logits, labels[part], reduction="sum") / len(batch)
                    loss.backward()
                    total += loss.item()
            if getattr(cfg, "clip", 0):
                nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.param_groups[0]["lr"] = rate(cfg.optim, len(losses), cfg.steps)
            optimizer.step()
            losses.append(total)
        for name in (name for name, buffer in buffers[0].items() if buffer.is_floating_point()):
            mean = sum(own[name] * size / sum(sizes) for own, size in zip(buffers, sizes, strict=True))
            assert isinstance(mean, Tensor)
            buffers = [own | {name: mean.clone()} for own in buffers]
        if len(losses) == cfg.steps:
            break
    model.load_state_dict(dict(model.named_parameters()) | buffers[0])
    scores = scored(model, *normalised(prepared, "test", cfg.data.test_limit))
    return {"losses": losses, "state": model.state_dict(), "scores": scores}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs by more than the tolerance, or is missing."""
    wrong = []
    if len(found["losses"]) != len(expected["losses"]):
        wrong.append("number of losses")
    gaps = [abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=False)]
    if not gaps or not all(gap <= TOLERANCE for gap in gaps):  # max() would drop a NaN that is not the first
        wrong.append(f"losses by {next((gap for gap in gaps if math.isnan(gap)), max(gaps, default=math.nan)):.2g}")
    if found["state"].keys() != expected["state"].keys():
        wrong.append("names of parameters")
    for name in found["state"].keys() & expected["state"].keys():
        gap = (found["state"][name] - expected["state"][name]).abs().max().item()
        if not gap <= TOLERANCE:
            wrong.append(f"{name} by {gap:.2g}")
    for name, value in expected["scores"].items():
        if not abs(found["scores"][name] - value) <= TOLERANCE:
            wrong.append(f"{name} by {abs(found['scores'][name] - value):.2g}")
    return wrong
