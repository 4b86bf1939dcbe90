"""A reference training loop for the experiments. It shares only models and the order of samples with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from common.data import loader, samples
from common.data.prepare import PreparedDataset
from common.models.sample_dropout import list_dropout_layers
from configs.shared import Optim

TOLERANCE = 1e-9
EXACT_SCORES = ("test_accuracy", "test_samples")
Buffers = dict[str, Tensor]


def compute_learning_rate(settings: Optim, step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine or linear decay to 0."""
    warmup = settings.warmup
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    if settings.decay == "cosine":
        return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (1 - progress)


def load_images(prepared: PreparedDataset, part: str, limit: int = 0) -> tuple[Tensor, Tensor]:
    """Return normalised images in float64 and labels; all of them, or the first `limit`."""
    statistics = torch.tensor(samples.STATISTICS[prepared.name], dtype=torch.float64)
    mean, std = statistics.view(2, -1, 1, 1)
    count = limit or None
    pixels = torch.from_numpy(prepared.map_array(f"{part}_images")[:count]).double()
    labels = torch.from_numpy(prepared.map_array(f"{part}_labels")[:count]).long()
    if pixels.dim() == 3:
        pixels = pixels[:, None]
    images = (pixels / 255 - mean) / std
    return images, labels


@torch.no_grad()
def compute_scores(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    model.eval()
    logits = model(images)
    loss = F.cross_entropy(logits, labels).item()
    is_correct = logits.argmax(1) == labels
    accuracy = is_correct.double().mean().item()
    return {"test_loss": loss, "test_accuracy": accuracy, "test_samples": len(labels)}


def train_reference(
    cfg: Any, model: nn.Module, prepared: PreparedDataset, shard_sizes: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Train a model in float64 in one process with the settings of an experiment. Return losses, norms of the
    gradients before clipping, state and scores.

    `shard_sizes` contains the number of samples in each shard of a batch; empty for a single shard. Each shard has
    BatchNorm buffers, which are averaged after each epoch, weighted by samples, as in an evaluation.
    """
    images, labels = load_images(prepared, "train", cfg.data.train_limit)
    microbatch_size = getattr(cfg, "microbatch", 0)  # BatchNorm has the statistics of a microbatch; 0 splits no shards
    batch_multiple = cfg.batch // getattr(cfg, "accumulate", 1)  # the last batch of an epoch has full microbatches
    shard_weights = shard_sizes or (1,)
    shard_buffers = [copy_buffers(model) for _ in shard_weights]
    dropout_layers = list_dropout_layers([model])
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=cfg.optim.momentum, nesterov=True)
    model.train()

    losses: list[float] = []
    norms: list[float] = []
    for epoch in itertools.count():
        order = torch.from_numpy(loader.draw_sample_order(len(images), cfg.seed, epoch))
        used_samples = len(images) // batch_multiple * batch_multiple
        batches = order[:used_samples].split(cfg.batch)
        remaining_steps = cfg.steps - len(losses)
        for step_of_epoch, batch in enumerate(batches[:remaining_steps]):
            position = step_of_epoch * cfg.batch
            optimizer.zero_grad()
            batch_loss = 0.0
            shards = batch.split(shard_sizes or len(batch))
            for shard, buffers in zip(shards, shard_buffers, strict=True):
                if not len(shard):
                    count_empty_batch(buffers)
                    continue
                for microbatch in shard.split(microbatch_size or len(shard)):
                    positions = range(position, position + len(microbatch))
                    position = positions.stop
                    for layer in dropout_layers:
                        layer.set_positions(epoch, [positions])
                    logits = functional_call(model, buffers, (images[microbatch],))
                    loss_sum = F.cross_entropy(logits, labels[microbatch], reduction="sum")
                    loss = loss_sum / len(batch)
                    loss.backward()
                    batch_loss += loss.item()
            max_norm = cfg.regularization.clip or math.inf
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            learning_rate = compute_learning_rate(cfg.optim, len(losses), cfg.steps)
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            losses.append(batch_loss)
        average_buffers(shard_buffers, shard_weights)
        if len(losses) == cfg.steps:
            break
    parameters = dict(model.named_parameters())
    model.load_state_dict(parameters | shard_buffers[0])
    test_images, test_labels = load_images(prepared, "test", cfg.data.test_limit)
    scores = compute_scores(model, test_images, test_labels)
    return {"losses": losses, "norms": norms, "state": model.state_dict(), "scores": scores}


def copy_buffers(model: nn.Module) -> Buffers:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def count_empty_batch(buffers: Buffers) -> None:
    """Count a batch of which a shard has no samples, as BatchNorm does."""
    for name in buffers:
        if name.endswith("num_batches_tracked"):
            buffers[name] += 1


def average_buffers(shard_buffers: Sequence[Buffers], weights: Sequence[int]) -> None:
    """Replace floating-point buffers of all shards with their weighted mean."""
    for name, first_buffer in shard_buffers[0].items():
        if not first_buffer.is_floating_point():
            continue
        mean = torch.zeros_like(first_buffer)
        for buffers, weight in zip(shard_buffers, weights, strict=True):
            mean += buffers[name] * weight / sum(weights)
        for buffers in shard_buffers:
            buffers[name] = mean.clone()


def list_differences(outcome: dict[str, Any], reference_run: dict[str, Any]) -> list[str]:
    """Return what differs from the reference run by more than the tolerance, is missing, or differs between ranks."""
    differences = list_loss_differences(outcome, reference_run)
    if outcome.get("norms"):
        differences += list_gaps("norms", outcome, reference_run)
    state = outcome["state"]
    reference_state = reference_run["state"]
    if state.keys() != reference_state.keys():
        differences.append("names of parameters")
    for name in state.keys() & reference_state.keys():
        difference = state[name] - reference_state[name]
        gap = difference.abs().max().item()
        if not gap <= TOLERANCE:
            differences.append(f"{name} by {gap:.2g}")
    for name, score in reference_run["scores"].items():
        gap = abs(outcome["scores"][name] - score)
        tolerance = 0.0 if name in EXACT_SCORES else TOLERANCE
        if not gap <= tolerance:
            differences.append(f"{name} by {gap:.2g}")
    if outcome.get("differing_ranks"):
        differences.append(f"states of ranks {outcome['differing_ranks']}")
    return differences


def list_loss_differences(outcome: dict[str, Any], reference_run: dict[str, Any]) -> list[str]:
    return list_gaps("losses", outcome, reference_run)


def list_gaps(name: str, outcome: dict[str, Any], reference_run: dict[str, Any]) -> list[str]:
    """Return what differs between the lists `name` of two runs, which contain a number for each step."""
    values = outcome[name]
    reference_values = reference_run[name]
    differences = []
    if len(values) != len(reference_values):
        differences.append(f"number of {name}")
    pairs = zip(values, reference_values, strict=False)
    gaps = torch.tensor([abs(a - b) for a, b in pairs], dtype=torch.float64)
    largest_gap = gaps.max().item() if len(gaps) else math.nan  # NaN if any gap is NaN
    if not largest_gap <= TOLERANCE:
        differences.append(f"{name} by {largest_gap:.2g}")
    return differences
