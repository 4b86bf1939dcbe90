"""A reference training loop for the experiments. It shares only models and the order of samples with them."""

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
    """Return the learning rate: a linear warm-up, then a cosine or linear decay to 0."""
    warmup = settings.warmup
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    if settings.decay == "cosine":
        return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (1 - progress)


def normalised(prepared: PreparedDataset, part: str, limit: int = 0) -> tuple[Tensor, Tensor]:
    """Return normalised images in float64 and labels; all of them, or the first `limit`."""
    statistics = torch.tensor(loader.STATISTICS[prepared.name], dtype=torch.float64)
    mean, std = statistics.view(2, -1, 1, 1)
    pixels = torch.from_numpy(prepared.map_array(f"{part}_images")[: limit or None]).double()
    if pixels.dim() == 3:
        pixels = pixels[:, None]
    labels = torch.from_numpy(prepared.map_array(f"{part}_labels")[: limit or None]).long()
    return (pixels / 255 - mean) / std, labels


@torch.no_grad()
def scored(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the scores of a model."""
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
    """Train a model in float64 in one process with the settings of an experiment. Return losses, state and scores.

    Args:
        shares: number of equal shards of a batch, or the sizes of the shards. Each shard has BatchNorm buffers, which
            are averaged after each epoch, weighted by samples, as in an evaluation.
        piece: samples of a microbatch, whose gradients are accumulated; 0 does not split shards.
        grain: the last batch of an epoch has the largest remaining multiple of this number of samples; by default, it
            is dropped.
    """
    images, labels = normalised(prepared, "train", cfg.data.train_limit)
    grain = grain or cfg.batch
    sizes = (1,) * shares if isinstance(shares, int) else shares
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=cfg.optim.momentum, nesterov=True)
    buffers_of_shards = [copy_buffers(model) for _ in sizes]
    model.train()
    losses: list[float] = []
    for epoch in itertools.count():
        order = torch.from_numpy(loader.draw_sample_order(len(images), cfg.seed, epoch))
        order = order[: len(images) // grain * grain]
        for batch in order.split(cfg.batch)[: cfg.steps - len(losses)]:
            optimizer.zero_grad()
            batch_loss = 0.0
            shards = batch.chunk(shares) if isinstance(shares, int) else batch.split(shares)
            for shard, buffers in zip(shards, buffers_of_shards, strict=True):
                if not len(shard):
                    count_empty_batch(buffers)
                    continue
                for microbatch in shard.split(piece or len(shard)):
                    logits = functional_call(model, buffers, (images[microbatch],))
                    loss = F.cross_entropy(logits, labels[microbatch], reduction="sum") / len(batch)
                    loss.backward()
                    batch_loss += loss.item()
            if getattr(cfg, "clip", 0):
                nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.param_groups[0]["lr"] = rate(cfg.optim, len(losses), cfg.steps)
            optimizer.step()
            losses.append(batch_loss)
        average_buffers(buffers_of_shards, sizes)
        if len(losses) == cfg.steps:
            break
    model.load_state_dict(dict(model.named_parameters()) | buffers_of_shards[0])
    scores = scored(model, *normalised(prepared, "test", cfg.data.test_limit))
    return {"losses": losses, "state": model.state_dict(), "scores": scores}


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def count_empty_batch(buffers: dict[str, Tensor]) -> None:
    """Count a batch of which a shard has no samples, as BatchNorm does."""
    for name in buffers:
        if name.endswith("num_batches_tracked"):
            buffers[name] += 1


def average_buffers(buffers_of_shards: list[dict[str, Tensor]], sizes: tuple[int, ...]) -> None:
    """Replace floating-point buffers of all shards with their mean, weighted by the sizes of the shards."""
    for name, first_buffer in buffers_of_shards[0].items():
        if not first_buffer.is_floating_point():
            continue
        mean = torch.zeros_like(first_buffer)
        for buffers, size in zip(buffers_of_shards, sizes, strict=True):
            mean += buffers[name] * size / sum(sizes)
        for buffers in buffers_of_shards:
            buffers[name] = mean.clone()


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return what differs by more than the tolerance, or is missing."""
    differing = []
    if len(actual["losses"]) != len(expected["losses"]):
        differing.append("number of losses")
    gaps = [abs(a - b) for a, b in zip(actual["losses"], expected["losses"], strict=False)]
    largest_gap = torch.tensor(gaps, dtype=torch.float64).max().item() if gaps else math.nan  # NaN if any gap is NaN
    if not largest_gap <= TOLERANCE:
        differing.append(f"losses by {largest_gap:.2g}")
    if actual["state"].keys() != expected["state"].keys():
        differing.append("names of parameters")
    for name in actual["state"].keys() & expected["state"].keys():
        gap = (actual["state"][name] - expected["state"][name]).abs().max().item()
        if not gap <= TOLERANCE:
            differing.append(f"{name} by {gap:.2g}")
    for name, score in expected["scores"].items():
        gap = abs(actual["scores"][name] - score)
        if not gap <= TOLERANCE:
            differing.append(f"{name} by {gap:.2g}")
    return differing
