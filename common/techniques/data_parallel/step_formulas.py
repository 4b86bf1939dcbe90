"""Formulas for the training state and the messages of a rank under data parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from common.data.loader import Loader
from common.runs.result import ReportData
from common.techniques.data_parallel.ddp import HOOK_ELEMENT_BYTES, POWERSGD_START_STEP
from common.techniques.data_parallel.sync_batchnorm import SyncBatchNormNd
from common.training import optimizers, step_formulas
from common.training.run import Run
from configs.ddp_multinode import Config

Shapes = Sequence[Sequence[int]]
"""Full shapes of parameters."""


@dataclass(frozen=True)
class StepFormulas:
    """The parameters of a model and their division among ranks.

    `shards` ranks divide each parameter with fully_shard, and `replicas` ranks hold the same shard.
    """

    cfg: Config
    units: Sequence[Shapes]
    """Parameters that fully_shard gathers together. The last unit is gathered until the backward pass ends."""
    shards: int
    replicas: int
    rank: int
    element_bytes: int
    is_compressed: bool
    """True if PowerSGD compresses the gradients of the measured step."""
    norm_channels: Sequence[int] = ()
    """Numbers of channels of the synchronized BatchNorm layers."""
    recomputed_channels: Sequence[int] = ()
    """The same for the layers whose forward pass is computed again in the backward pass."""

    @property
    def shapes(self) -> list[Sequence[int]]:
        """Shapes of all parameters."""
        shapes: list[Sequence[int]] = []
        for unit in self.units:
            shapes += unit
        return shapes

    def count_stored(self, shape: Sequence[int]) -> int:
        """Return the number of values of a parameter that this rank stores. Dimension 0 is divided in equal chunks."""
        if self.shards == 1:
            return math.prod(shape)
        chunk = math.ceil(shape[0] / self.shards)
        shard = self.rank % self.shards
        rows = min(chunk, max(0, shape[0] - shard * chunk))
        return rows * math.prod(shape[1:])

    def count_gathered(self, shapes: Shapes) -> int:
        """Return the number of values of gathered parameters, whose shards are padded to equal sizes."""
        return sum(self.shards * math.ceil(shape[0] / self.shards) * math.prod(shape[1:]) for shape in shapes)

    def predict_state_bytes(self) -> int | None:
        """Return the bytes of parameters and gradients at their peaks, optimizer state, and PowerSGD's local state.

        Between its forward and backward pass, a layer is not gathered, unless reshard=false.
        """
        stored = [self.count_stored(shape) for shape in self.shapes]
        updated = self.list_updated_sizes()[self.rank] if self.cfg.state_sharding.zero1 else stored
        optimizer_bytes = optimizers.predict_state_bytes(self.cfg.optim, updated, self.element_bytes)
        if optimizer_bytes is None:
            return None
        values = sum(stored) + self.count_peak_gradients()
        if self.shards > 1:
            *layers, last_unit = [self.count_gathered(unit) for unit in self.units]
            values += last_unit + (max(layers, default=0) if self.cfg.reshard else sum(layers))
        if self.is_compressed:
            values += sum(stored) + sum(map(self.count_factors, self.shapes))
        return values * self.element_bytes + optimizer_bytes

    def count_peak_gradients(self) -> int:
        """Return the largest number of gradients of a rank in a backward pass.

        fully_shard divides the gradients of a layer when its backward pass ends, and those of the last unit at the end.
        """
        if self.shards == 1:
            return sum(map(self.count_stored, self.shapes))
        undivided = [sum(map(math.prod, unit)) for unit in self.units]
        divided = 0
        peak = 0
        for number in reversed(range(len(self.units) - 1)):
            peak = max(peak, divided + undivided[number] + undivided[-1])
            divided += sum(map(self.count_stored, self.units[number]))
        return max(peak, divided + undivided[-1])

    def count_factors(self, shape: Sequence[int]) -> int:
        """Return the number of values of PowerSGD's two factors of a gradient, or 0 if it is not compressed.

        A gradient is compressed if its factors have less than half as many values.
        """
        rows = shape[0]
        columns = math.prod(shape[1:])
        is_smaller = 2 * (rows + columns) * self.cfg.powersgd_rank < rows * columns
        return (rows + columns) * min(rows, columns, self.cfg.powersgd_rank) if is_smaller and len(shape) > 1 else 0

    def predict_sent_bytes(self) -> int:
        """Return the bytes that this rank sends in a step with ring algorithms.

        DDP all-reduces the gradients. With zero1, an all-gather follows, in which each rank sends as many values as the
        rank that updates most. fully_shard gathers each layer in each direction, or in the forward pass only, and
        reduces its gradients, first in a replica and then among the replicas.
        """
        ring = 2 * (self.replicas - 1) / self.replicas
        norm_bytes = self.predict_norm_messages()
        gathered = [self.count_gathered(unit) for unit in self.units]
        if self.shards > 1:
            repeated = sum(gathered[:-1]) if self.cfg.reshard else 0
            values = (self.shards - 1) / self.shards * (2 * sum(gathered) + repeated)
            values += ring * sum(gathered) / self.shards
            return round(values * self.element_bytes + norm_bytes)
        sizes = [math.prod(shape) for shape in self.shapes]
        values = ring * (sum(map(self.count_compressed, self.shapes)) if self.is_compressed else sum(sizes))
        sent = values * HOOK_ELEMENT_BYTES.get(self.cfg.communication, self.element_bytes)
        if self.cfg.state_sharding.zero1:
            sent += (self.replicas - 1) * max(map(sum, self.list_updated_sizes())) * self.element_bytes
        return round(sent + norm_bytes)

    def predict_norm_messages(self) -> float:
        """Return the bytes that this rank sends to synchronize BatchNorm.

        Each layer all-gathers three numbers per channel in each forward pass, and all-reduces two in the backward pass.
        """
        ranks = self.shards * self.replicas
        channels = sum(self.norm_channels)
        gathered = 3 * ranks * (channels + sum(self.recomputed_channels))
        reduced = 2 * channels
        return (ranks - 1) / ranks * (gathered + 2 * reduced) * self.element_bytes

    def list_updated_sizes(self) -> list[list[int]]:
        """Return the sizes of the parameters that each rank updates with zero1."""
        from common.techniques.sharded_optimizer.api import divide_sizes  # imported here because few runs use it

        return divide_sizes([math.prod(shape) for shape in self.shapes], self.replicas)

    def count_compressed(self, shape: Sequence[int]) -> int:
        """Return the number of values that PowerSGD sends for a gradient."""
        return self.count_factors(shape) or math.prod(shape)


def report_step_formulas(cfg: Config, run: Run, units: Sequence[nn.Module]) -> ReportData:
    """Report the formulas of all ranks. All ranks must call this function.

    `units` are the modules that fully_shard gathers separately, and last the model. If blocks recompute activations,
    the activations of one process are no reference.
    """
    if not all(parameter.requires_grad for parameter in units[-1].parameters()):
        return ReportData()  # frozen parameters have no gradients
    measured_step = min(run.resumed_after + cfg.log.memory, run.total)
    shards = (cfg.fsdp or run.world.size) if cfg.strategy == "fsdp" else 1
    formulas = StepFormulas(
        cfg,
        list_unit_shapes(units),
        shards,
        run.world.size // shards,
        run.world.rank,
        run.dtype.itemsize,
        cfg.communication == "powersgd" and measured_step >= POWERSGD_START_STEP,
        list_norm_channels(units[-1]),
        list_recomputed_channels(units[-1]) if cfg.memory.recompute != "none" else [],
    )
    predicted: dict[str, float] = {}
    state = formulas.predict_state_bytes()
    if state is not None:
        predicted[step_formulas.STATE] = state
    if not (cfg.sync_batchnorm and run.device.type == "cuda"):  # the layers of torch send other messages
        predicted[step_formulas.SENT] = formulas.predict_sent_bytes()
    if cfg.memory.recompute == "none":
        assert run.state is not None and isinstance(run.state.loader, Loader)
        predicted[step_formulas.SAMPLE_SHARE] = run.state.loader.local_samples / cfg.batch
    return step_formulas.gather_formulas(predicted, run.world)


def list_norm_channels(module: nn.Module) -> list[int]:
    """Return the number of channels of each synchronized BatchNorm layer of a module."""
    return [layer.num_features for layer in module.modules() if isinstance(layer, SyncBatchNormNd)]


def list_recomputed_channels(model: nn.Module) -> list[int]:
    """Return the number of channels of each synchronized BatchNorm layer in the blocks that are computed again."""
    from common.techniques.recompute.api import list_recomputed_blocks  # imported here because few runs use it

    channels: list[int] = []
    for block in list_recomputed_blocks(model):
        channels += list_norm_channels(block)
    return channels


def list_unit_shapes(units: Sequence[nn.Module]) -> list[Shapes]:
    """Return the shapes of the parameters of each unit, without those of earlier units."""
    earlier_parameters: set[nn.Parameter] = set()
    shapes: list[Shapes] = []
    for unit in units:
        parameters = [parameter for parameter in unit.parameters() if parameter not in earlier_parameters]
        earlier_parameters.update(parameters)
        shapes.append([tuple(parameter.shape) for parameter in parameters])
    return shapes
