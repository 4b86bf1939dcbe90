"""Data, device, and ranks of a run on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from common.checkpoint.stop_request import StopRequest
from common.config.lookup import import_object
from common.data.loader import Loader, draw_sample_order
from common.data.prepare import PreparedDataset
from common.data.samples import Images, open_samples
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from configs.shared import Experiment, TrainingExperiment


def choose_loss(cfg: TrainingExperiment, samples: Images) -> Callable[..., Tensor]:
    """Return the loss of a config for samples, with the arguments of a loss in torch.nn.functional."""
    if cfg.loss == "cross_entropy":
        return samples.cross_entropy
    loss: Callable[..., Tensor] = import_object("common.training.losses:build_loss")(cfg.loss)
    return loss


class RunData:
    """Data, device, and ranks of a run on one rank."""

    def __init__(self, cfg: Experiment, ranks: Ranks, prepared: PreparedDataset, stop_request: StopRequest) -> None:
        self.cfg = cfg
        self.ranks = ranks
        self.prepared = prepared
        self.stop_request = stop_request

    @property
    def world(self) -> World:
        """The ranks that train now. In an elastic run, the ranks may change between two steps."""
        return self.ranks.current

    @property
    def trains(self) -> bool:
        """True if the run trains a model; False for a pure measurement."""
        return isinstance(self.cfg, TrainingExperiment)

    @property
    def training_cfg(self) -> TrainingExperiment:
        """Config of a run that trains a model. Raises TypeError for a pure measurement."""
        if not isinstance(self.cfg, TrainingExperiment):
            raise TypeError("a measurement trains no model and has no settings for training")
        return self.cfg

    @cached_property
    def train_set(self) -> Images:
        """Training samples; only the first `data.train_limit` samples if this setting is not 0."""
        return open_samples(self.prepared, "train", self.training_cfg.data.train_limit)

    @cached_property
    def test_set(self) -> Images:
        """Test samples; only the first `data.test_limit` samples if this setting is not 0."""
        return open_samples(self.prepared, "test", self.training_cfg.data.test_limit)

    @property
    def sample_shape(self) -> torch.Size:
        """Shape of one input: [C, H, W] for images, [T] for text."""
        return self.train_set.shape

    @property
    def outputs(self) -> int:
        """Number of outputs of the network: the number of classes or tokens, or of values in a float target."""
        return self.train_set.outputs

    @cached_property
    def loss(self) -> Callable[..., Tensor]:
        """Loss of the setting `loss`, with the arguments of a loss in torch.nn.functional.

        `run.loss(outputs, targets)` is the mean over the samples, and `reduction="sum"` requests the sum.
        """
        return choose_loss(self.training_cfg, self.train_set)

    @property
    def device(self) -> torch.device:
        """Device on which this rank trains."""
        return self.world.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the model's parameters and computations."""
        dtype: torch.dtype = getattr(torch, self.training_cfg.dtype)
        return dtype

    @property
    def shard(self) -> tuple[int, int]:
        """Shard index of this rank and number of shards in data-parallel training."""
        return self.world.rank, self.world.size

    def batches(
        self,
        *,
        shard: tuple[int, int] = (0, 1),
        inputs: bool = True,
        targets: bool = True,
        keep_partial: bool = False,
    ) -> Loader:
        """Return a loader of this rank's training batches, one per optimizer step.

        `shard` (r, n) selects the r-th of n shards of each batch. If `shard` equals `self.shard`, the sizes of the
        shards are set in `cfg.batch_plan`; otherwise all shards have equal sizes. In a pipeline, the first rank needs
        only inputs and the last rank needs only targets. If `keep_partial` is True, the last batch of an epoch may be
        smaller. Raises UserError if the training set has too few samples.
        """
        return self._make_loader(shard, inputs=inputs, targets=targets, drop_last=not keep_partial)

    def microbatches(self, count: int, *, shard: tuple[int, int] = (0, 1)) -> Loader:
        """Return a loader of batches, each split into `count` microbatches for gradient accumulation.

        The sizes of the microbatches are set in `cfg.batch_plan`. For a pipeline, use `batches` instead: the pipeline
        engine splits each batch itself.
        """
        return self._make_loader(shard, batch=self.training_cfg.batch // count, microbatches=count)

    def _make_loader(self, shard: tuple[int, int], **options: Any) -> Loader:
        cfg = self.training_cfg
        return Loader.from_config(
            self.train_set,
            cfg,
            self.device,
            shard=shard,
            weights=cfg.batch_plan.weights if shard == self.shard else (),
            stop_requested=lambda: bool(self.stop_request.signal_number),
            **options,
        )

    def load_first_inputs(self, samples: int) -> Tensor:
        """Return the first inputs [samples, ...] of the training set, on this rank's device."""
        return self.train_set.load_inputs(slice(0, samples), self.device, self.dtype)

    def draw_random_batches(self, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard (inputs, targets) of up to `count` randomly drawn full batches.

        `seed` determines the order of the samples, independently of their order in training. The samples are not
        augmented.
        """
        size = self.training_cfg.batch
        rank, ranks = self.shard
        order = torch.from_numpy(draw_sample_order(len(self.train_set), seed, 0))
        batches = order[: len(order) // size * size].view(-1, size)  # drops the last partial batch
        for batch in batches[:count]:
            samples = batch.view(ranks, -1)[rank]
            inputs = self.train_set.load_inputs(samples, self.device, self.dtype)
            yield inputs, self.train_set.load_targets(samples, self.device, self.dtype)
