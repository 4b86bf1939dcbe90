"""Batches of a prepared set, in an order that is a pure function of (seed, epoch, position).

Images stay uint8 in memory, shared by all processes of a host. Several batches at a time are gathered,
moved to the device and normalised in one vectorised step, and then handed out as views.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import seeds
from common.prepare import Prepared
from common.processes import die_with_parent, shield
from configs.shared import Data

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


class Images:
    """One part of a prepared set: images uint8 [N, H, W] (grey) or [N, 3, H, W], and labels int64 [N]."""

    def __init__(self, prepared: Prepared, part: str, limit: int = 0) -> None:
        images = torch.from_numpy(prepared.array(f"{part}_images"))
        labels = torch.from_numpy(prepared.array(f"{part}_labels")).long()
        self.classes = int(labels.max()) + 1
        self.images, self.labels = (images[:limit], labels[:limit]) if limit else (images, labels)
        self.mean, self.std = (per_colour(values) for values in STATISTICS[prepared.name])

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> torch.Size:
        """Of one image."""
        return self.images.shape[1:]

    def inputs(self, index: Tensor | slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Normalised images on the device: (pixel / 255 - mean) / std."""
        picked = self.images[index] if isinstance(index, slice) else self.images.index_select(0, index)
        x = picked.to(device).to(dtype)
        mean, std = (value.to(x) if isinstance(value, Tensor) else value for value in (self.mean, self.std))
        return x.sub_(255 * mean).mul_(1 / (255 * std))

    def targets(self, index: Tensor | slice, device: torch.device) -> Tensor:
        """Labels [n] on the device."""
        return self.labels[index].to(device)


def per_colour(values: Any) -> Any:
    """One number as it is, one for each colour as a tensor [colours, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) if isinstance(values, tuple) else values


def load(prepared: Prepared, settings: Data) -> tuple[Images, Images]:
    """The training and the test part."""
    return (
        Images(prepared, "train", settings.train_limit),
        Images(prepared, "test", settings.test_limit),
    )


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `count` samples in an epoch, whatever the number of processes."""
    return seeds.generator(seed, "order", epoch).permutation(count)


class Loader:
    """Training batches, epoch after epoch, from any position on.

    Every batch is full: the ragged rest of an epoch (count modulo batch) is left out, and another rest
    each time. `epoch` and `position` (samples of this epoch already handed out) are all its state.
    A process that needs only inputs or only targets, as a pipeline's first and last stage do, asks
    for just these and gets None for the other. With `share` = (r, n), process r of n gets the r-th
    of n equal slices of every batch: together they see the batches that one process would see.
    """

    def __init__(
        self,
        data: Images,
        batch: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block: int = 1,
        inputs: bool = True,
        targets: bool = True,
        share: tuple[int, int] = (0, 1),
        workers: int = 0,
    ) -> None:
        if len(data) < batch:
            raise ValueError(f"{len(data)} training samples hold no full batch of {batch}; lower batch")
        if batch % share[1]:
            raise ValueError(f"batch={batch} cannot be shared evenly by {share[1]} processes")
        self.data, self.batch, self.seed, self.block = data, batch, seed, block
        self.device, self.dtype = device, dtype
        self.wants_inputs, self.wants_targets, self.share, self.workers = inputs, targets, share, workers
        self.epoch = self.position = 0

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return len(self.data) // self.batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """The rest of the current epoch; at its end the next epoch begins."""
        for x, y, count in self._blocks():
            own = self.batch // self.share[1]
            for number in range(count):
                self.position += self.batch
                piece = slice(number * own, (number + 1) * own)
                yield (None if x is None else x[piece]), (None if y is None else y[piece])
        self.epoch, self.position = self.epoch + 1, 0

    def _blocks(self) -> Iterator[tuple[Tensor | None, Tensor | None, int]]:
        """Inputs, targets and number of batches, several batches at a time, from the current position on."""
        index = torch.from_numpy(order(len(self.data), self.seed, self.epoch))
        end, (rank, ranks) = self.steps * self.batch, self.share
        pieces = [
            index[start : min(start + self.block * self.batch, end)].view(-1, ranks, self.batch // ranks)[:, rank]
            for start in range(self.position, end, self.block * self.batch)
        ]
        if not self.workers:
            return map(self._block, pieces)
        ahead: Any = torch.utils.data.DataLoader(
            Blocks(self),
            batch_size=None,
            sampler=[piece.numpy() for piece in pieces],  # tensors would be passed on by a thread, which forks badly
            num_workers=self.workers,
            worker_init_fn=shielded,
            generator=torch.Generator(),  # else a resumed epoch draws once more from the stream that dropout uses
        )
        return ((self._move(x), self._move(y), count) for x, y, count in ahead)

    def _block(self, rows: Tensor, device: torch.device | None = None) -> tuple[Tensor | None, Tensor | None, int]:
        place, flat = device or self.device, rows.reshape(-1)
        x = self.data.inputs(flat, place, self.dtype) if self.wants_inputs else None
        y = self.data.targets(flat, place) if self.wants_targets else None
        return x, y, len(rows)

    def _move(self, value: Tensor | None) -> Tensor | None:
        return value if value is None else value.to(self.device)


class Blocks(torch.utils.data.Dataset[Any]):
    """A loader's blocks as its workers make them, on the CPU."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getitem__(self, rows: np.ndarray) -> tuple[Tensor | None, Tensor | None, int]:
        return self.loader._block(torch.from_numpy(rows), torch.device("cpu"))


def shielded(worker: int) -> None:
    """A worker ends with its rank and not before: signals to stop are for the rank."""
    shield()
    die_with_parent()
