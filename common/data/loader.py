"""Batches of a prepared set, in an order that is a pure function of (seed, epoch, position).

Images stay uint8 in memory, shared by all ranks of a host. Several batches at a time are gathered,
moved to the device and normalised in one vectorised step, and then handed out as views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.core import seeds
from common.core.errors import UserError, summarize_error
from common.core.processes import die_with_parent
from common.core.signals import ignore_stop_signals
from common.data.augment import Augment
from common.data.prepare import Prepared
from configs.batch_plan import cut_batch
from configs.shared import Experiment

# mean and standard deviation of the training pixels, scaled to [0, 1]; of each colour, where there are colours
STATISTICS: dict[str, tuple[Any, Any]] = {
    "mnist": (0.1307, 0.3081),
    "digits": (0.1699, 0.3058),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's
    "generated": ((0.5, 0.5, 0.5), (0.29, 0.29, 0.29)),
    "vectors": (0.5, 0.29),
}
IMAGE = (28, 28)  # of mnist and digits
# inputs and targets of several batches, number of batches, samples of this rank in each
Block = tuple[Tensor | None, Tensor | None, int, int]


class DataWorkerError(RuntimeError):
    """A data worker of this rank was killed, or does not deliver its batches."""


def is_worker_failure(error: BaseException) -> bool:
    """Check whether an error comes from a data worker of this rank, also where torch itself noticed it.

    So does one that was raised while that was handled: torch raises its error wherever the main thread is.
    """
    if isinstance(error, DataWorkerError) or "DataLoader worker" in str(error):
        return True
    return error.__context__ is not None and is_worker_failure(error.__context__)


def get_statistics(prepared: Prepared) -> tuple[Any, Any]:
    """Return mean and standard deviation of the training images: a number each, or one for each colour.

    Raises UserError where they are lost.
    """
    known = prepared.statistics or STATISTICS.get(prepared.name)
    if known is None:
        raise UserError(f"{prepared.path} is damaged: it has no statistics; delete it and start again")
    return known


class Images:
    """The train or test part of a prepared set: images uint8 [N, H, W] (grey) or [N, 3, H, W], labels int64 [N]."""

    def __init__(self, prepared: Prepared, part: str, limit: int = 0) -> None:
        images = torch.from_numpy(prepared.map_array(f"{part}_images"))
        labels = torch.from_numpy(prepared.map_array(f"{part}_labels")).long()
        self.classes = int(labels.max()) + 1
        self.images, self.labels = (images[:limit], labels[:limit]) if limit else (images, labels)
        self.mean, self.std = (to_channel_tensor(values) for values in get_statistics(prepared))

    def __len__(self) -> int:
        return self.labels.shape[0]  # each step asks several times, and len() of a tensor runs Python code of torch

    @property
    def shape(self) -> torch.Size:
        """Shape of one image: [H, W] or [3, H, W]."""
        return self.images.shape[1:]

    def load_inputs(self, index: Tensor | slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the images at `index` (int64 [n] or a slice), normalised, on the device: [n, H, W] or [n, 3, H, W]."""
        picked = self.images[index] if isinstance(index, slice) else self.images.index_select(0, index)
        return self.normalize(picked, device, dtype)

    def normalize(self, pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return (pixel / 255 - mean) / std of uint8 images [n, H, W] or [n, 3, H, W], on the device."""
        x = pixels.to(device).to(dtype)
        mean, std = (value.to(x) if isinstance(value, Tensor) else value for value in (self.mean, self.std))
        return x.sub_(255 * mean).mul_(1 / (255 * std))

    def load_targets(self, index: Tensor | slice, device: torch.device) -> Tensor:
        """Return the labels int64 [n] at `index` (int64 [n] or a slice) on the device."""
        return self.labels[index].to(device)


def to_channel_tensor(values: Any) -> Any:
    """Return a number unchanged, and several, one for each channel, as a float64 tensor [C, 1, 1]."""
    return values if isinstance(values, float) else torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


def draw_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the permutation int64 [count] of an epoch: a function of seed and epoch, not of the number of ranks."""
    return seeds.make_generator(seed, "order", epoch).permutation(count)


@dataclasses.dataclass(eq=False)
class Loader:
    """Training batches (x, y), epoch after epoch, from any position on: x [n, H, W] or [n, 3, H, W], y int64 [n].

    With `drop_last` every batch is full, and the last partial batch of an epoch (other samples in each epoch) is left
    out. `epoch` and `position` (samples of this epoch already handed out) are the whole state, and `size` is the
    number of samples in the newest batch, over all ranks. Without `inputs` or `targets`, as in a pipeline's last and
    first stage, x or y is None. With `shard` = (r, n), rank r of n gets the r-th of n slices of every batch: together
    they see the batches that one rank would see. The slices are in proportion to `weights`, by default equal; those of
    a partial batch, too, as far as whole samples can be. Some may be empty. `augment` is data.augment (see `Augment`).

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
    workers: int = 0
    drop_last: bool = True
    augment: str = "none"

    def __post_init__(self) -> None:
        if len(self.data) < self.batch and self.drop_last:
            raise UserError(f"{len(self.data)} training samples hold no full batch of {self.batch}; lower batch")
        rank, ranks = self.shard
        if not self.weights and self.batch % ranks:
            raise UserError(f"batch={self.batch} cannot be shared evenly by {ranks} ranks")
        self.epoch = self.position = 0
        self.size = self.batch
        self.set_shards(rank, cut_batch(self.batch, self.weights or (1,) * ranks))
        if self.augment != "none" and len(self.data.shape) < 2:
            raise UserError(f"data.augment={self.augment} changes images, and this set has vectors; leave it out")
        self.transform = Augment(self.augment, self.data.shape[-2:], self.seed) if self.augment != "none" else None

    @classmethod
    def from_config(cls, data: Images, cfg: Experiment, device: torch.device, **more: Any) -> Loader:
        """Create the loader that a config describes. Raises UserError where it does not fit the data."""
        options: dict[str, Any] = {name: getattr(cfg.data, name) for name in ("block", "workers", "augment")}
        options |= {"batch": cfg.batch, "seed": cfg.seed, "device": device, "dtype": getattr(torch, cfg.dtype)}
        return cls(data, **(options | more))

    @property
    def steps(self) -> int:
        """Number of batches in an epoch."""
        return len(self.data) // self.batch if self.drop_last else -(-len(self.data) // self.batch)

    @property
    def own_samples(self) -> int:
        """Samples of this rank in a full batch."""
        return self.counts[self.rank]

    @property
    def mean_shard(self) -> float:
        """Samples of the newest batch, over all ranks, by the number of ranks."""
        return self.size / len(self.counts)

    @property
    def weight(self) -> float:
        """Samples of this rank in a full batch by those of an equal shard: 1 where all are equal."""
        return self.own_samples * len(self.counts) / self.batch

    def set_shards(self, rank: int, counts: Sequence[int]) -> None:
        """Cut full batches from the next one on by `counts`, samples of each rank; this one is `rank` of them.

        All ranks call it between the same two steps. Batches and their order stay; what was read ahead is read anew.
        """
        if sum(counts) != self.batch:
            raise ValueError(f"shards {counts} do not add up to the batch of {self.batch}")
        self.rank, self.counts, self.moved = rank, tuple(counts), True

    @property
    def epoch_samples(self) -> int:
        """Number of samples in an epoch, over all ranks."""
        return min(self.steps * self.batch, len(self.data))

    def count_samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` steps, over all ranks."""
        epochs, rest = divmod(steps, self.steps)
        whole = self.epoch_samples
        return epochs * whole + min(rest * self.batch, whole)

    def list_positions(self, step: int) -> list[range]:
        """Return the positions in the epoch of this rank's samples of a step, from 0, as one microbatch."""
        start = step * self.batch
        size = min(self.batch, len(self.data) - start)
        counts = self.counts if size == self.batch else cut_batch(size, self.counts)
        first = start + sum(counts[: self.rank])
        return [range(first, first + counts[self.rank])]

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position, also between two batches."""
        self.epoch, self.position, self.moved = state["epoch"], state["position"], True

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the rest of the current epoch; at its end the next epoch begins."""
        while self.position < self.epoch_samples:
            self.moved = False
            for batch in self._read_batches():
                self.size = min(self.batch, len(self.data) - self.position)
                self.position += self.size
                yield batch
                if self.moved:
                    break
        self.epoch, self.position = self.epoch + 1, 0

    def _read_batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's shards of the rest of the epoch, from the current position on, a block read ahead."""
        for x, y, count, own in self._iterate_blocks():
            for number in range(count):
                rows = slice(number * own, (number + 1) * own)
                yield (None if x is None else x[rows]), (None if y is None else y[rows])

    def _iterate_blocks(self) -> Iterator[Block]:
        """Yield blocks of batches, from the current position on."""
        indices = list(self._iterate_block_indices())
        if not self.workers:
            return map(self._load_block, indices)
        ahead: Any = torch.utils.data.DataLoader(
            BlockDataset(self),
            batch_size=None,
            sampler=indices,  # numpy: tensors would be passed on by a thread, which forks badly
            num_workers=self.workers,
            worker_init_fn=tie_worker_to_rank,
            generator=torch.Generator(),  # else a resumed epoch draws once more from the stream that dropout uses
        )
        blocks = receive_blocks(ahead)
        return ((self._move_to_device(x), self._move_to_device(y), count, own) for x, y, count, own in blocks)

    def _iterate_block_indices(self) -> Iterator[np.ndarray]:
        """Yield this rank's samples of each block, int64 [2, batches, own]: index and position in the epoch."""
        index, rank, counts = draw_order(len(self.data), self.seed, self.epoch), self.rank, self.counts
        both = np.stack([index, np.arange(len(index))])
        end = len(index) // self.batch * self.batch
        for start in range(self.position, end, self.block * self.batch):
            full = both[:, start : min(start + self.block * self.batch, end)]
            yield take_shard(full.reshape(2, -1, self.batch), rank, counts)
        if not self.drop_last and max(self.position, end) < len(index):
            yield take_shard(both[:, None, end:], rank, cut_batch(len(index) - end, counts))

    def _load_block(self, indices: np.ndarray, device: torch.device | None = None) -> Block:
        """Gather a block of `_iterate_block_indices` on the device."""
        device, (rows, positions) = device or self.device, torch.from_numpy(indices).flatten(1)
        x = None
        if self.inputs:
            pixels = self.data.images.index_select(0, rows)
            if self.transform is not None:
                pixels = self.transform(pixels, self.epoch, positions)
            x = self.data.normalize(pixels, device, self.dtype)
        y = self.data.load_targets(rows, device) if self.targets else None
        return x, y, *indices.shape[1:]

    def _move_to_device(self, value: Tensor | None) -> Tensor | None:
        return value if value is None else value.to(self.device)


def receive_blocks(ahead: Iterable[Block]) -> Iterator[Block]:
    """Yield what data workers deliver. Raises DataWorkerError where one has ended while its tensors were received."""
    blocks = iter(ahead)
    while True:
        try:
            block = next(blocks)
        except StopIteration:
            return
        except (OSError, EOFError) as error:  # of the socket through which torch receives shared memory
            raise DataWorkerError(f"a data worker has ended: {summarize_error(error)}") from error
        yield block


def take_shard(batches: np.ndarray, rank: int, counts: Sequence[int]) -> np.ndarray:
    """Return one rank's slice of batches [..., sum(counts)]: behind those of the ranks before it."""
    first = sum(counts[:rank])
    return batches[..., first : first + counts[rank]]


class BlockDataset(torch.utils.data.Dataset[Any]):
    """A loader's blocks, for its worker processes; tensors stay on the CPU."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getitem__(self, indices: np.ndarray) -> Block:
        return self.loader._load_block(indices, torch.device("cpu"))


def tie_worker_to_rank(worker: int) -> None:
    """Let a worker ignore stop signals, which are for its rank, and end with that rank."""
    ignore_stop_signals()
    die_with_parent()
