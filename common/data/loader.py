"""Batches of a prepared set, in an order that is a pure function of (seed, epoch, position).

Images stay uint8 in memory, shared by all processes of a host. Several batches at a time are gathered,
moved to the device and normalised in one vectorised step, and then handed out as views.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.core import seeds
from common.core.errors import UserError
from common.core.signals import die_with_parent, shield
from common.data.prepare import Prepared
from configs.shared import Data, Experiment

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
# inputs and targets of several batches, their number, and the samples that this process has of each
Block = tuple[Tensor | None, Tensor | None, int, int]


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
        return self.normalised(picked, device, dtype)

    def normalised(self, pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The same of images uint8 that were changed."""
        x = pixels.to(device).to(dtype)
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


class Augment:
    """torchvision's v2 transforms on uint8 images, the same for a sample in whatever process and block it is changed.

    Each image has a stream of its own, out of the seed, the epoch and its position there: a run that goes on changes
    the rest of an epoch as if it had not been interrupted. The global stream stays where it is.
    """

    def __init__(self, kind: str, side: int, seed: int) -> None:
        from torchvision.transforms import v2  # a second to import, so only when asked for

        crop = v2.RandomCrop(side, padding=max(1, side // 8))
        self.change = v2.Compose([crop, v2.RandomHorizontalFlip()] if kind == "crop_flip" else [crop])
        self.seed = seed

    def __call__(self, images: Tensor, epoch: int, positions: Tensor) -> Tensor:
        """Images uint8 [n, H, W] or [n, 3, H, W] at `positions` [n] of an epoch; as many of the same shape."""
        changed = torch.empty_like(images)
        with torch.random.fork_rng(devices=[]):
            for number, position in enumerate(positions.tolist()):
                torch.default_generator.manual_seed(seeds.derive(self.seed, "augment", epoch, position))
                changed[number] = self.change(images[number, None] if images.dim() == 3 else images[number])
        return changed


class Loader:
    """Training batches, epoch after epoch, from any position on.

    Every batch is full: the ragged rest of an epoch (count modulo batch) is left out, and another rest
    each time; with `ragged` it is the epoch's last batch. `epoch` and `position` (samples of this epoch already
    handed out) are all its state, and `size` is the number of samples in the newest batch.
    A process that needs only inputs or only targets, as a pipeline's first and last stage do, asks
    for just these and gets None for the other. With `share` = (r, n), process r of n gets the r-th
    of n equal slices of every batch: together they see the batches that one process would see. Slices of a ragged
    batch differ by one sample at most, the first are the longer ones, and the last may be empty.
    With `augment` each image is changed by chance, as data.augment says: which way, follows from the seed, the epoch
    and its position, whatever the number of processes.
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
        ragged: bool = False,
        augment: str = "none",
    ) -> None:
        if len(data) < batch and not ragged:
            raise ValueError(f"{len(data)} training samples hold no full batch of {batch}; lower batch")
        if batch % share[1]:
            raise ValueError(f"batch={batch} cannot be shared evenly by {share[1]} processes")
        self.data, self.batch, self.seed, self.block = data, batch, seed, block
        self.device, self.dtype = device, dtype
        self.wants_inputs, self.wants_targets, self.share, self.workers = inputs, targets, share, workers
        self.ragged, self.augment = ragged, Augment(augment, data.shape[-1], seed) if augment != "none" else None
        self.epoch = self.position = 0
        self.size = batch

    @classmethod
    def of(cls, data: Images, cfg: Experiment, device: torch.device, **more: Any) -> Loader:
        """As the settings say. Raises UserError where they do not fit the data."""
        said: dict[str, Any] = {name: getattr(cfg.data, name) for name in ("block", "workers", "augment")}
        said |= {"batch": cfg.batch, "seed": cfg.seed, "device": device, "dtype": getattr(torch, cfg.dtype)}
        try:
            return cls(data, **(said | more))
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.data) // self.batch) if self.ragged else len(self.data) // self.batch

    def samples(self, steps: int) -> int:
        """Samples in so many steps from the start, over all processes."""
        epochs, rest = divmod(steps, self.steps)
        whole = len(self.data) if self.ragged else self.steps * self.batch
        return epochs * whole + min(rest * self.batch, whole)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """The rest of the current epoch; at its end the next epoch begins."""
        for x, y, count, own in self._blocks():
            for number in range(count):
                self.size = min(self.batch, len(self.data) - self.position)
                self.position += self.size
                piece = slice(number * own, (number + 1) * own)
                yield (None if x is None else x[piece]), (None if y is None else y[piece])
        self.epoch, self.position = self.epoch + 1, 0

    def _blocks(self) -> Iterator[Block]:
        """Several batches at a time, from the current position on."""
        pieces = list(self._pieces())
        if not self.workers:
            return map(self._block, pieces)
        ahead: Any = torch.utils.data.DataLoader(
            Blocks(self),
            batch_size=None,
            sampler=pieces,  # numpy: tensors would be passed on by a thread, which forks badly
            num_workers=self.workers,
            worker_init_fn=shielded,
            generator=torch.Generator(),  # else a resumed epoch draws once more from the stream that dropout uses
        )
        return ((self._move(x), self._move(y), count, own) for x, y, count, own in ahead)

    def _pieces(self) -> Iterator[np.ndarray]:
        """This process's samples of each block, [2, batches, own]: which they are, and their positions in the epoch."""
        index, (rank, ranks) = order(len(self.data), self.seed, self.epoch), self.share
        both = np.stack([index, np.arange(len(index))])
        end = len(index) // self.batch * self.batch
        for start in range(self.position, end, self.block * self.batch):
            full = both[:, start : min(start + self.block * self.batch, end)]
            yield full.reshape(2, -1, ranks, self.batch // ranks)[:, :, rank]
        if self.ragged and max(self.position, end) < len(index):
            yield np.array_split(both[:, end:], ranks, axis=1)[rank][:, None]

    def _block(self, piece: np.ndarray, device: torch.device | None = None) -> Block:
        place, (rows, positions) = device or self.device, torch.from_numpy(piece).flatten(1)
        x = None
        if self.wants_inputs:
            pixels = self.data.images.index_select(0, rows)
            if self.augment is not None:
                pixels = self.augment(pixels, self.epoch, positions)
            x = self.data.normalised(pixels, place, self.dtype)
        y = self.data.targets(rows, place) if self.wants_targets else None
        return x, y, *piece.shape[1:]

    def _move(self, value: Tensor | None) -> Tensor | None:
        return value if value is None else value.to(self.device)


class Windows:
    """A loader's batches in windows of `count`, the microbatches of one optimizer step, from any position on.

    If an epoch's batches are no multiple of `count`, its last window is shorter. State and place are the loader's, and
    between two windows they are those of an optimizer step.
    """

    def __init__(self, loader: Loader, count: int) -> None:
        self.loader, self.count = loader, count

    @property
    def steps(self) -> int:
        """Windows in an epoch."""
        return -(-self.loader.steps // self.count)

    def samples(self, steps: int) -> int:
        """Samples in so many windows from the start, over all processes."""
        epochs, rest = divmod(steps, self.steps)
        return (epochs * self.loader.steps + rest * self.count) * self.loader.batch

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[list[tuple[Any, Any]]]:
        """The rest of the current epoch; at its end the next epoch begins."""
        source, left = iter(self.loader), self.loader.steps - self.loader.position // self.loader.batch
        while left > 0:
            window = list(itertools.islice(source, min(self.count, left)))
            left -= len(window)
            yield window
        next(source, None)  # not before the last window was used: here the loader turns to the next epoch


class Blocks(torch.utils.data.Dataset[Any]):
    """A loader's blocks as its workers make them, on the CPU."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getitem__(self, piece: np.ndarray) -> Block:
        return self.loader._block(piece, torch.device("cpu"))


def shielded(worker: int) -> None:
    """A worker ends with its rank and not before: signals to stop are for the rank."""
    shield()
    die_with_parent()
