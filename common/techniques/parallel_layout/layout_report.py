"""Report on a layout: throughput, and formulas for the memory and messages of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.measure.timing import time_calls
from common.models.gpt import GPT
from common.runs.result import ReportData
from common.techniques.parallel_layout import layout_formulas
from common.techniques.parallel_layout.model_shape import ParameterSize, Shape
from common.techniques.parallel_layout.parallel_model import ParallelModel
from common.training import step_formulas
from common.training.run import Run
from common.training.step_meter import StepMeter
from configs.gpt_parallel import Config
from configs.layout import Layout

STATE = ("parameters", "gradients", "optimizer")
PEAK_STATE = ("peak_parameters", "peak_gradients", "optimizer")
ACTIVATIONS = ("activations", "peak_activations")
PRODUCT_SIZES = {"cpu": 768, "cuda": 4096}
"""Side of the square matrices whose product is timed. A GPU does not reach its highest rate with small matrices."""
PRODUCTS = 5


def measure_matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the highest measured rate of a matrix product in FLOP/s, with the threads of this rank."""
    size = PRODUCT_SIZES[device.type]
    x = torch.randn(size, size, dtype=dtype, device=device)
    seconds = time_calls(lambda: torch.mm(x, x), device, PRODUCTS)
    return 2 * float(size) ** 3 / min(seconds)


def describe_shape(cfg: Config, model: GPT) -> Shape:
    """Return the sizes of a model, of which this rank may hold only some blocks, and of a microbatch of one rank."""
    arguments: dict[str, Any] = model.recipe["arguments"]
    return Shape(
        width=arguments["width"],
        layers=len(model.blocks),
        heads=arguments["heads"],
        key_value_heads=arguments["key_value_heads"],
        hidden=arguments["hidden"],
        is_gated=arguments["activation"] == "swiglu",
        vocabulary=arguments["vocabulary"],
        context=arguments["context"],
        samples=cfg.batch_plan.microbatch,
        microbatches=cfg.accumulate,
        dropout=cfg.dropout > 0,
        element_bytes=8 if cfg.dtype == "float64" else 4,
        recompute=cfg.memory.recompute,
    )


def list_parameter_sizes(model: GPT) -> dict[str, ParameterSize]:
    """Return the full shape of each parameter, and the dimensions in which it is divided, by name."""
    dims = model.list_shard_dims()
    return {name: ParameterSize(tuple(tensor.shape), dims[name]) for name, tensor in model.named_parameters()}


def predict_rank(cfg: Config, model: GPT, parallel: ParallelModel, device: torch.device) -> dict[str, int]:
    """Return the bytes of this rank by category, from the formulas.

    `full_state` are those of the undivided parameters, gradients and optimizer states of this rank's layers, and
    `flops` are the floating-point operations of these layers for each token.
    """
    shape = describe_shape(cfg, model)
    sizes = list_parameter_sizes(model)
    predicted = parallel.predict_bytes(sizes, shape)
    if cfg.optim.name not in ("adam", "adamw"):
        del predicted["optimizer"]
    if cfg.precision == "bf16":  # the formulas count numbers of one size
        predicted = {name: size for name, size in predicted.items() if name not in (*ACTIVATIONS, "sent")}
    elif device.type != "cpu":  # the kernels for GPUs save other tensors
        predicted = {name: size for name, size in predicted.items() if name not in ACTIVATIONS}
    full_state = layout_formulas.predict_state_bytes(sizes, Layout(), shape.element_bytes)
    predicted["full_state"] = sum(full_state.values())
    predicted["flops"] = layout_formulas.count_flops_per_token(sizes, shape, cfg.size.tied)
    return predicted


def sum_formulas(predicted: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes of a rank by the names of `step_formulas`, as far as there are formulas."""
    formulas: dict[str, float] = {}
    if "optimizer" in predicted:
        formulas[step_formulas.STATE] = sum(predicted[name] for name in PEAK_STATE)
    if "activations" in predicted:
        formulas[step_formulas.ACTIVATIONS] = predicted.get("peak_activations", predicted["activations"])
    if "sent" in predicted:
        formulas[step_formulas.SENT] = predicted["sent"]
    return formulas


@dataclass
class LayoutReport:
    """Report on throughput, memory and messages. Only the network gpt has formulas."""

    run: Run
    layout: Layout
    memory: list[dict[str, int]]
    """Bytes by category, for each rank."""
    sent_bytes: list[int]
    """Bytes that each rank sent in the measured step."""
    predicted: dict[str, int]
    """Bytes by category and `sent`, from the formulas; empty without formulas."""
    rank_formulas: ReportData
    """Bytes of each rank, from the formulas."""
    full_state_bytes: int
    """Bytes of parameters, gradients and optimizer state of a single process; 0 without formulas."""
    tokens_per_sample: int
    flops_per_token: int
    """Floating-point operations; 0 without formulas."""
    matrix_rate: float
    """Sum of the rates of a matrix product on all ranks in FLOP/s, measured at the same time."""

    @classmethod
    def gather(cls, cfg: Config, run: Run, parallel: ParallelModel, meter: StepMeter) -> LayoutReport:
        """Create the report from the measurements of all ranks. All ranks must call this method."""
        memory = run.world.gather(meter.memory)
        sent_bytes = run.world.gather(meter.sent_bytes)
        predicted: dict[str, int] = {}
        rank_formulas = ReportData()
        full_state_bytes = 0
        flops = 0
        if isinstance(parallel.model, GPT):
            by_rank = run.world.all_gather(predict_rank(cfg, parallel.model, parallel, run.device))
            rank_formulas = step_formulas.make_report([sum_formulas(rank) for rank in by_rank])
            for name in by_rank[0]:
                predicted[name] = max(rank[name] for rank in by_rank)
            del predicted["full_state"], predicted["flops"]
            copies = cfg.layout.ranks // cfg.layout.stage_ranks  # number of ranks that hold the same stages
            full_state_bytes = sum(rank["full_state"] for rank in by_rank) // copies
            flops = sum(rank["flops"] for rank in by_rank) // copies
            if "optimizer" not in predicted:
                full_state_bytes = 0
        meter.add_formulas(predicted)
        tokens = run.sample_shape[0]
        dtype = torch.bfloat16 if cfg.precision == "bf16" else run.dtype
        rate = sum(run.world.gather(measure_matrix_rate(dtype, run.device)))
        return cls(run, cfg.layout, memory, sent_bytes, predicted, rank_formulas, full_state_bytes, tokens, flops, rate)

    def rows(self) -> Mapping[str, str]:
        if not self.memory[0]:
            return {}
        layout = self.layout
        degrees = f"replicas={layout.replicas} fsdp={layout.fsdp} context={layout.context} tensor={layout.tensor}"
        if layout.stages > 1:
            degrees = f"stages={layout.stages} {degrees}"
        switches = "".join(f" {name}=true" for name in ("sequence", "zero1") if getattr(layout, name))
        rows = {"layout": degrees + switches}
        measured = self.result().measured
        if "tokens_per_second" in measured:
            rows["tokens"] = f"{measured['tokens_per_second']:,.0f} tokens/s"
        if "model_flops_utilization" in measured:
            rows["MFU"] = f"{measured['model_flops_utilization']:.1%} of the rate of a matrix product on all ranks"
        return rows

    def _list_categories(self) -> dict[str, int]:
        """Return the largest value of any rank by category."""
        largest = {}
        for name in self.memory[0]:
            largest[name] = max(rank[name] for rank in self.memory)
        return largest | {"sent": max(self.sent_bytes)}

    def result(self) -> ReportData:
        measured: dict[str, Any] = {}
        if self.memory[0]:
            largest = self._list_categories()
            measured = {f"{name}_bytes": size for name, size in largest.items()} | dict(self.rank_formulas.measured)
            if self.full_state_bytes:
                measured["training_state_share"] = sum(largest[name] for name in STATE) / self.full_state_bytes
        tokens_per_second = self.run.compute_samples_per_second() * self.tokens_per_sample
        if tokens_per_second:
            measured["tokens_per_second"] = tokens_per_second
        if tokens_per_second and self.flops_per_token:
            measured["model_flops_utilization"] = self.flops_per_token * tokens_per_second / self.matrix_rate
        formulas = {f"predicted_{name}_bytes": size for name, size in self.predicted.items()}
        return ReportData(outcome=formulas, measured=measured)
