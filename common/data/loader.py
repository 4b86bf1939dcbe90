"""Loader of a prepared data set. The order of the samples depends only on the seed and the epoch.

Images are stored as uint8 in memory that all ranks on a host share. The loader gathers several batches at a time, moves
them to the device and normalizes them in one vectorized operation. The loader then returns views of single batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.data.samples import Images
from common.data.workers import DataWorkerError as DataWorkerError  # noqa: PLC0414 (raised while iterating a Loader)
from common.data.workers import Samples, WorkerPool
from common.system import seeds
from common.system.errors import UserError
from configs.batch_plan import divide_batch
from configs.shared import TrainingExperiment

if TYPE_CHECKING:
    from common.data.augment import Augment


def draw_sample_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the order of the samples in an epoch, as a permutation int64 [count].

    The order of the samples does not depend on the number of ranks.
    """
    return seeds.make_generator(seed, "order", epoch).permutation(count)


@dataclasses.dataclass(eq=False)
class Loader:
    """Iterable over the training batches (x, y) of one epoch, which can start at any position in the epoch.

    x and y are the inputs and targets of `Images`. The attributes `epoch` and `position` (number of samples of this
    epoch that have been returned) are the entire state of the loader. The attribute `size` is the number of samples in
    the newest batch, over all ranks.

    `batch`: number of samples in a batch, over all ranks.
    `block`: number of batches that are gathered in one operation.
    `inputs`, `targets`: if False, None is returned instead of x or y. In a pipeline, only the first stage needs x, and
        only the last stage needs y.
    `shard`: a pair (r, n), which selects slice r of the n slices of each batch. The slices of all ranks together form
        the same batches that a single rank would get.
    `weights`: relative sizes of the slices, which are equal by default. A partial batch is divided in the same
        proportions, rounded to whole samples. The slice of a rank may be empty.
    `microbatches`: if nonzero, yield a list of this many microbatches for each optimizer step. Each microbatch has
        `batch` samples. The last list of an epoch may be shorter. Pipelines do not use this option, because a pipeline
        engine splits its batches itself.
    `workers`: number of processes that prepare blocks in advance. Iterating raises DataWorkerError if a worker exits or
        returns no block within `worker_timeout` seconds. If `stop_requested()` becomes true while the rank waits for a
        block, the rank prepares the remaining batches of the epoch itself, so that the current step can complete and a
        checkpoint can be saved.
    `drop_last`: skip a partial last batch of an epoch. The skipped samples differ between epochs.
    `augment`: value of data.augment (see `Augment`).

    Raises UserError if the data set has fewer samples than a batch, or if augmentation is requested for vectors. Also
    raises UserError if a batch cannot be divided evenly among the ranks, unless `weights` are given.
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
            part = "microbatch" if self.microbatches else "batch"
            raise UserError(
                f"the training set has {len(self.data)} samples, fewer than one {part} of {self.batch}; lower batch"
            )
        rank, ranks = self.shard
        if not self.weights and self.batch % ranks:
            raise UserError(f"a batch of {self.batch} samples cannot be divided evenly among {ranks} ranks")
        self.epoch = 0
        self.position = 0
        self.size = self.batch
        self.set_shards(rank, divide_batch(self.batch, self.weights or (1,) * ranks))
        self.transform: Augment | None = None
        if self.augment == "none":
            return
        if len(self.data.shape) < 2 or not self.data.has_pixels:
            kind = "vectors" if self.data.has_pixels else "float inputs"
            raise UserError(
                f"data.augment={self.augment} requires images, but this data set contains {kind}; omit data.augment"
            )
        from common.data.augment import Augment  # imported here because few runs augment their data

        self.transform = Augment(self.augment, self.data.shape[-2:], self.seed)

    @classmethod
    def from_config(
        cls, data: Images, cfg: TrainingExperiment, device: torch.device, *, batch: int | None = None, **options: Any
    ) -> Loader:
        """Create a loader with the settings in a config.

        Raises UserError if the settings are incompatible with the data set.
        """
        return cls(
            data,
            batch or cfg.batch,
            cfg.seed,
            device,
            getattr(torch, cfg.dtype),
            block=cfg.data.block,
            workers=cfg.data.workers,
            augment=cfg.data.augment,
            worker_timeout=cfg.launch.step_timeout / 2,  # expires before other ranks time out waiting for this rank
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
        """Number of samples of this rank in a full batch."""
        return self.counts[self.rank]

    @property
    def mean_shard(self) -> float:
        """Mean number of samples per rank in the newest batch."""
        return self.size / len(self.counts)

    @property
    def shard_weight(self) -> float:
        """Number of samples of this rank in a full batch, divided by the number in an equal shard."""
        return self.local_samples * len(self.counts) / self.batch

    @property
    def local_samples_if_unequal(self) -> int | None:
        """Number of samples of this rank in a full batch, or None if the shards are equal."""
        return self.local_samples if self.weights else None

    def set_shards(self, rank: int, counts: Sequence[int]) -> None:
        """Divide full batches into shards of `counts` samples, starting with the next step.

        `rank` is the index of this rank's shard. All ranks must call this method between the same two steps. The
        batches and their order do not change. Blocks that were prepared in advance are prepared again.
        """
        if sum(counts) != self.batch:
            raise ValueError(f"the shards {counts} do not add up to the batch size ({self.batch})")
        self.rank = rank
        self.counts = tuple(counts)
        self.is_stale = True

    def count_samples(self, steps: int) -> int:
        """Return the number of samples in the first `steps` steps of a run, over all ranks."""
        epochs, last_steps = divmod(steps, self.steps)
        return epochs * self.epoch_samples + min(last_steps * self.step_samples, self.epoch_samples)

    def list_sample_positions(self, step: int) -> list[range]:
        """Return where this rank's samples for a step lie in the epoch, as one range of positions per microbatch.

        `step` is the number of the step in the epoch, counted from 0.
        """
        start = step * self.step_samples
        positions = []
        for batch_start in range(start, min(start + self.step_samples, self.epoch_samples), self.batch):
            size = min(self.batch, len(self.data) - batch_start)
            counts = self.counts if size == self.batch else divide_batch(size, self.counts)
            first = batch_start + sum(counts[: self.rank])
            positions.append(range(first, first + counts[self.rank]))
        return positions

    def state_dict(self) -> dict[str, int]:
        """Return the current epoch and the position in it."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to the epoch and position in `state`. An iteration in progress continues at the new position."""
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.is_stale = True

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch, then move to the start of the next epoch.

        If `microbatches` is nonzero, yield a list of microbatches for each optimizer step instead.
        """
        batches = self._iterate_batches()
        return self._group_microbatches(batches) if self.microbatches else batches

    def _iterate_batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the remaining batches of the current epoch, and update `epoch`, `position` and `size`."""
        while self.position < self.epoch_samples:
            self.is_stale = False
            for batch in self._iterate_shards():
                self.size = min(self.batch, len(self.data) - self.position)
                self.position += self.size
                yield batch
                if self.is_stale:  # the shards or the position have changed: start again at the current position
                    break
        self.epoch += 1
        self.position = 0

    def _group_microbatches(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
        """Yield a list of the microbatches of each optimizer step."""
        while (samples_left := self.epoch_samples - self.position) > 0:
            batches_left = -(-samples_left // self.batch)
            yield list(itertools.islice(batches, min(self.microbatches, batches_left)))
        next(batches, None)  # moves to the next epoch, once the last microbatches have been used

    def _iterate_shards(self) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's shards of the remaining batches of the epoch."""
        for x, y, (count, shard_samples) in self._iterate_blocks():
            for number in range(count):
                rows = slice(number * shard_samples, (number + 1) * shard_samples)
                yield (None if x is None else x[rows]), (None if y is None else y[rows])

    def _iterate_blocks(self) -> Iterator[tuple[Tensor | None, Tensor | None, tuple[int, ...]]]:
        """Yield the inputs, targets, and shape of each remaining block.

        The shape contains the number of batches in the block and the number of this rank's samples in each batch.
        """
        blocks = list(self._iterate_block_indices())
        finished = 0
        if self.workers:
            example = self._make_empty_samples()
            pool = WorkerPool(self._load_samples_on_cpu, blocks, self.workers, example, self.worker_timeout)
            for x, y in pool.iterate_blocks(self.device, self.stop_requested):
                yield x, y, blocks[finished].shape[1:]
                finished += 1
        # Without workers, or after a stop request, this rank prepares the remaining blocks.
        for indices in blocks[finished:]:
            yield *self._load_samples(indices, self.device), indices.shape[1:]

    def _make_empty_samples(self) -> Samples:
        """Return empty inputs and targets that have the same data types as a block on the CPU."""
        cpu = torch.device("cpu")
        inputs = self.data.load_inputs(slice(0), cpu, self.dtype) if self.inputs else None
        targets = self.data.load_targets(slice(0), cpu, self.dtype) if self.targets else None
        return inputs, targets

    def _iterate_block_indices(self) -> Iterator[np.ndarray]:
        """Yield the index and the position in the epoch of each of this rank's samples, block by block.

        Each block is an int64 array [2, batches, samples of this rank in a batch].
        """
        order = draw_sample_order(len(self.data), self.seed, self.epoch)
        table = np.stack([order, np.arange(len(order))])
        full_end = len(order) // self.batch * self.batch
        block_samples = self.block * self.batch
        for start in range(self.position, full_end, block_samples):
            block = table[:, start : min(start + block_samples, full_end)]
            yield slice_rank_shard(block.reshape(2, -1, self.batch), self.rank, self.counts)

        # Yield the last batch of the epoch if it is partial.
        if not self.drop_last and max(self.position, full_end) < len(order):
            counts = divide_batch(len(order) - full_end, self.counts)
            yield slice_rank_shard(table[:, None, full_end:], self.rank, counts)

    def _load_samples(self, indices: np.ndarray, device: torch.device) -> Samples:
        """Gather, augment and normalize the samples of one block on a device.

        `indices` is a block that `_iterate_block_indices` has yielded.
        """
        rows, positions = torch.from_numpy(indices).flatten(1)
        if self.data.reads_on_demand:
            sample_seeds = [seeds.derive_seed(self.seed, "sample", self.epoch, place) for place in positions.tolist()]
            read = self.data.read_samples(rows.tolist(), sample_seeds, device, self.dtype)
            return read[0] if self.inputs else None, read[1] if self.targets else None
        x = None
        if self.inputs:
            pixels = self.data.images.index_select(0, rows)
            if self.transform is not None:
                pixels = self.transform(pixels, self.epoch, positions)
            x = self.data.normalize(pixels, device, self.dtype)
        y = self.data.load_targets(rows, device, self.dtype) if self.targets else None
        return x, y

    def _load_samples_on_cpu(self, indices: np.ndarray) -> Samples:
        return self._load_samples(indices, torch.device("cpu"))


def slice_rank_shard(batches: np.ndarray, rank: int, counts: Sequence[int]) -> np.ndarray:
    """Return one rank's slice of batches [..., sum(counts)].

    `counts` contains the number of samples in each rank's slice. The slices are in the order of the ranks.
    """
    first = sum(counts[:rank])
    return batches[..., first : first + counts[rank]]
