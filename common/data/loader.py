"""Batches of a prepared data set, in an order that is a pure function of (seed, epoch, position).

Images stay uint8 in memory, shared by all ranks of a host. Several batches at a time are gathered, moved to the device
and normalised in one vectorised step, and then returned as views.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.core import seeds
from common.core.errors import UserError
from common.data.augment import Augment
from common.data.prepare import PreparedDataset
from common.data.workers import DataWorkerError as DataWorkerError  # noqa: PLC0414 (raised while iterating a Loader)
from common.data.workers import Samples, WorkerPool
from configs.batch_plan import divide_batch
from configs.shared import Experiment

# Mean and standard deviation of the training pixels, scaled to [0, 1]; one of each per colour for colour images.
STATISTICS: dict[str, tuple[Any, Any]] = {
    "mnist": (0.1307, 0.3081),
    "digits": (0.1699, 0.3058),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's
    "generated": ((0.5, 0.5, 0.5), (0.29, 0.29, 0.29)),
    "vectors": (0.5, 0.29),
}


def get_statistics(prepared: PreparedDataset) -> tuple[Any, Any]:
    """Return mean and standard deviation of the training images: one number each, or one per colour.

    Raises UserError if the file with the statistics is missing.
    """
    statistics = prepared.statistics or STATISTICS.get(prepared.name)
    if statistics is None:
        raise UserError(f"{prepared.path} is damaged: it has no statistics; delete it and start again")
    return statistics


class Images:
    """The train or test part of a prepared set: images uint8 [N, H, W] (grey) or [N, 3, H, W], labels int64 [N]."""

    def __init__(self, prepared: PreparedDataset, part: str, limit: int = 0) -> None:
        """Map the arrays of `part` into memory; `limit` is the number of samples to use, 0 for all."""
        images = torch.from_numpy(prepared.map_array(f"{part}_images"))
        labels = torch.from_numpy(prepared.map_array(f"{part}_labels")).long()
        self.class_count = int(labels.max()) + 1
        self.images = images[: limit or None]
        self.labels = labels[: limit or None]
        mean, std = get_statistics(prepared)
        self.mean = to_channel_tensor(mean)
        self.std = to_channel_tensor(std)

    def __len__(self) -> int:
        return self.labels.shape[0]  # called several times per step; len() of a tensor runs Python code of torch

    @property
    def shape(self) -> torch.Size:
        """Shape of one image: [H, W] or [3, H, W]."""
        return self.images.shape[1:]

    def load_inputs(self, index: Tensor | slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the images at `index` (int64 [n] or a slice), normalised, on the device: [n, H, W] or [n, 3, H, W]."""
        pixels = self.images[index] if isinstance(index, slice) else self.images.index_select(0, index)
        return self.normalize(pixels, device, dtype)

    def normalize(self, pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return (pixel / 255 - mean) / std of uint8 images [n, H, W] or [n, 3, H, W], on the device."""
        inputs = pixels.to(device).to(dtype)
        mean = self.mean.to(inputs) if isinstance(self.mean, Tensor) else self.mean
        std = self.std.to(inputs) if isinstance(self.std, Tensor) else self.std
        return inputs.sub_(255 * mean).mul_(1 / (255 * std))

    def load_targets(self, index: Tensor | slice, device: torch.device) -> Tensor:
        """Return the labels int64 [n] at `index` (int64 [n] or a slice) on the device."""
        return self.labels[index].to(device)


def to_channel_tensor(statistic: Any) -> Any:
    """Return a single number unchanged, and one number per colour as a float64 tensor [C, 1, 1]."""
    if isinstance(statistic, float):
        return statistic
    return torch.tensor(statistic, dtype=torch.float64).view(-1, 1, 1)


def draw_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the permutation int64 [count] of an epoch. It does not depend on the number of ranks."""
    return seeds.make_generator(seed, "order", epoch).permutation(count)


@dataclasses.dataclass(eq=False)
class Loader:
    """Training batches (x, y), epoch after epoch, from any position: x [n, H, W] or [n, 3, H, W], y int64 [n].

    `epoch` and `position` (samples of this epoch already returned) are the whole state. `size` is the number of samples
    in the newest batch, over all ranks.

    `batch`: samples of a batch over all ranks.
    `block`: batches that are gathered at once.
    `inputs`, `targets`: False replaces x or y by None, as in the last and first stage of a pipeline.
    `shard`: (r, n) returns the r-th of n slices of every batch. Together the ranks see the batches of a single rank.
    `weights`: proportions of the slices, by default equal. A partial batch is cut in the same proportions, rounded to
        samples. Slices may be empty.
    `microbatches`: if set, yield lists of so many batches: the microbatches of one optimizer step, `batch` samples
        each. The last list of an epoch may be shorter. (A pipeline's engine splits a batch itself.)
    `workers`: processes that prepare blocks ahead. Iterating raises DataWorkerError if one exits, or returns no block
        within `worker_timeout` seconds. If `stop_requested()` becomes true while the rank waits for a block, the rank
        prepares the remaining batches of the epoch itself, so that the step completes and a checkpoint can be saved.
    `drop_last`: skip the last partial batch of an epoch (different samples in each epoch).
    `augment`: value of data.augment (see `Augment`).

    Raises UserError if no batch is full, if the ranks cannot share a batch evenly and there are no weights, or if
    vectors would be augmented.
    """

    data: Images
    batch: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    _: dataclasses.KW_ONLY
    block: int = 1
    inputs: bool = True
    targets: bool = True
    shard: tuple[int, int] = (0, 1)
    weights: tuple[int, ...] = ()
    microbatches: int = 0
    workers: int = 0
    worker_timeout: float = 60.0
    stop_requested: Callable[[], bool] = bool
    drop_last: bool = True
    augment: str = "none"

    def __post_init__(self) -> None:
        if len(self.data) < self.batch and self.drop_last:
            raise UserError(f"{len(self.data)} training samples hold no full batch of {self.batch}; lower batch")
        rank, ranks = self.shard
        if not self.weights and self.batch % ranks:
            raise UserError(f"batch={self.batch} cannot be shared evenly by {ranks} ranks")
        self.epoch = 0
        self.position = 0
        self.size = self.batch
        self.set_shards(rank, divide_batch(self.batch, self.weights or (1,) * ranks))
        self.transform: Augment | None = None
        if self.augment == "none":
            return
        if len(self.data.shape) < 2:
            raise UserError(f"data.augment={self.augment} changes images, and this set has vectors; leave it out")
        self.transform = Augment(self.augment, self.data.shape[-2:], self.seed)

    @classmethod
    def from_config(
        cls, data: Images, cfg: Experiment, device: torch.device, *, batch: int | None = None, **options: Any
    ) -> Loader:
        """Create the loader of a config. Raises UserError if the config does not fit the data."""
        return cls(
            data,
            batch or cfg.batch,
            cfg.seed,
            device,
            getattr(torch, cfg.dtype),
            block=cfg.data.block,
            workers=cfg.data.workers,
            augment=cfg.data.augment,
            worker_timeout=cfg.launch.step_timeout / 2,  # before the other ranks time out waiting for this one
            **options,
        )

    @property
    def epoch_samples(self) -> int:
        """Number of samples in an epoch, over all ranks."""
        samples = len(self.data)
        return samples - samples % self.batch if self.drop_last else samples

    @property
    def step_samples(self) -> int:
        """Number of samples in a full optimizer step, over all ranks."""
        return self.batch * (self.microbatches or 1)

    @property
    def steps(self) -> int:
        """Number of optimizer steps in an epoch."""
        return -(-self.epoch_samples // self.step_samples)

    @property
    def local_samples(self) -> int:
        """Samples of this rank in a full batch."""
        return self.counts[self.rank]

    @property
    def mean_shard(self) -> float:
        """Mean number of samples per rank in the newest batch."""
        return self.size / len(self.counts)

    @property
    def weight(self) -> float:
        """Samples of this rank in a full batch divided by those of an equal shard."""
        return self.local_samples * len(self.counts) / self.batch

    def set_shards(self, rank: int, counts: Sequence[int]) -> None:
        """Cut full batches into shards of `counts` samples from the next step on; this rank has index `rank`.

        All ranks call it between the same two steps. The batches and their order stay; blocks read ahead are read
        again.
        """
        if sum(counts) != self.batch:
            raise ValueError(f"shards {counts} do not add up to the batch of {self.batch}")
        self.rank = rank
        self.counts = tuple(counts)
        self.is_stale = True

    def count_samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` steps of a run, over all ranks."""
        epochs, last_steps = divmod(steps, self.steps)
        return epochs * self.epoch_samples + min(last_steps * self.step_samples, self.epoch_samples)

    def list_positions(self, step: int) -> list[range]:
        """Return this rank's positions in the epoch at a step (counted from 0), one range per microbatch."""
        start = step * self.step_samples
        positions = []
        for batch_start in range(start, min(start + self.step_samples, self.epoch_samples), self.batch):
            size = min(self.batch, len(self.data) - batch_start)
            counts = self.counts if size == self.batch else divide_batch(size, self.counts)
            first = batch_start + sum(counts[: self.rank])
            positions.append(range(first, first + counts[self.rank]))
        return positions

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move to a position. It may be called between two steps of an iteration."""
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.is_stale = True

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining steps of the current epoch, then move to the next epoch."""
        batches = self._iterate_batches()
        return self._group_microbatches(batches) if self.microbatches else batches

    def _iterate_batches(self) -> Iterator[tuple[Any, Any]]:
        while self.position < self.epoch_samples:
            self.is_stale = False
            for batch in self._read_batches():
                self.size = min(self.batch, len(self.data) - self.position)
                self.position += self.size
                yield batch
                if self.is_stale:  # the shards or the position have changed: read again from the position
                    break
        self.epoch += 1
        self.position = 0

    def _group_microbatches(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
        """Yield the microbatches of one optimizer step at a time."""
        while (samples_left := self.epoch_samples - self.position) > 0:
            batches_left = -(-samples_left // self.batch)
            yield list(itertools.islice(batches, min(self.microbatches, batches_left)))
        next(batches, None)  # moves to the next epoch, after the last microbatches were used

    def _read_batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's shards of the epoch's remaining batches, from the current position."""
        for x, y, (count, shard_samples) in self._iterate_blocks():
            for number in range(count):
                rows = slice(number * shard_samples, (number + 1) * shard_samples)
                yield (None if x is None else x[rows]), (None if y is None else y[rows])

    def _iterate_blocks(self) -> Iterator[tuple[Tensor | None, Tensor | None, tuple[int, ...]]]:
        """Yield inputs, targets and shape (batches, samples of this rank in each) of the remaining blocks."""
        blocks = list(self._iterate_block_indices())
        finished = 0
        if self.workers:
            pool = WorkerPool(self._load_on_cpu, blocks, self.workers, self._make_example(), self.worker_timeout)
            for x, y in pool.iterate_blocks(self.device, self.stop_requested):
                yield x, y, blocks[finished].shape[1:]
                finished += 1
        for indices in blocks[finished:]:
            yield *self._load_samples(indices, self.device), indices.shape[1:]

    def _make_example(self) -> Samples:
        """Return inputs and targets of zero samples, with the types of a block on the CPU."""
        inputs = torch.empty(0, *self.data.shape, dtype=self.dtype) if self.inputs else None
        targets = torch.empty(0, dtype=torch.int64) if self.targets else None
        return inputs, targets

    def _iterate_block_indices(self) -> Iterator[np.ndarray]:
        """Yield this rank's samples of each block, int64 [2, batches, samples]: index and position in the epoch."""
        order = draw_order(len(self.data), self.seed, self.epoch)
        table = np.stack([order, np.arange(len(order))])
        full_end = len(order) // self.batch * self.batch
        block_samples = self.block * self.batch
        for start in range(self.position, full_end, block_samples):
            block = table[:, start : min(start + block_samples, full_end)]
            yield take_shard(block.reshape(2, -1, self.batch), self.rank, self.counts)

        # the last batch of the epoch, if it is partial
        if not self.drop_last and max(self.position, full_end) < len(order):
            counts = divide_batch(len(order) - full_end, self.counts)
            yield take_shard(table[:, None, full_end:], self.rank, counts)

    def _load_samples(self, indices: np.ndarray, device: torch.device) -> Samples:
        """Gather the samples of one block of `_iterate_block_indices` on a device."""
        rows, positions = torch.from_numpy(indices).flatten(1)
        x = None
        if self.inputs:
            pixels = self.data.images.index_select(0, rows)
            if self.transform is not None:
                pixels = self.transform(pixels, self.epoch, positions)
            x = self.data.normalize(pixels, device, self.dtype)
        y = self.data.load_targets(rows, device) if self.targets else None
        return x, y

    def _load_on_cpu(self, indices: np.ndarray) -> Samples:
        return self._load_samples(indices, torch.device("cpu"))


def take_shard(batches: np.ndarray, rank: int, counts: Sequence[int]) -> np.ndarray:
    """Return the slice of one rank in batches [..., sum(counts)]; slices are in the order of the ranks."""
    first = sum(counts[:rank])
    return batches[..., first : first + counts[rank]]
