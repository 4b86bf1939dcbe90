"""Measurement of the savings by pruning: the size of the model file and the time of a forward pass.

torch has sparse kernels only for linear layers. The pruned linear layers are stored and computed in the compressed
sparse row (CSR) format, and convolutions stay dense.
"""

from __future__ import annotations

import contextlib
import copy
import io
import subprocess
import warnings
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from common.measure.timing import time_calls
from common.models import exporting
from common.models.networks import FlatLinearReLU, LinearReLU
from common.models.zero_channels import count_parameters, remove_zero_channels
from common.runs.result import ReportData
from common.system.errors import summarize_error
from common.system.text import format_count
from common.techniques.pruning import int8
from common.techniques.pruning.pruning_masks import MASK, Masks, count_nonzero
from configs.networks import get_network_name
from configs.sparse_prune import Config

ROUNDS = 9  # number of timing rounds
SLOW_ROUNDS = 3  # number of rounds if calling every variant once takes more than a second
MIN_TURN_SECONDS = 4e-3
EXPORT_SAMPLES = 7
SPARSE_TENSOR_CORES = (8, 0)  # lowest compute capability with sparse tensor cores


def strip_masks(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float32 and eval mode, without masks and gradients."""
    stripped = copy.deepcopy(model).float().eval().requires_grad_(False)
    for module in stripped.modules():
        module._buffers.pop(MASK, None)
    for parameter in stripped.parameters():
        parameter.grad = None
        parameter.add_(0.0)  # turns the -0.0 of masked negative weights into 0.0, because random signs compress badly
    return stripped


# ---- size of the model file


def measure_file_sizes(model: nn.Module) -> tuple[int, int]:
    """Return the size, in bytes, of the model file that torch.save writes, before and after compression with zlib."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that CSR is in beta
        torch.save(model.state_dict(), file)
    return file.tell(), len(zlib.compress(file.getvalue()))


class CsrLinear(nn.Module):
    """A linear layer that stores its weight [out, in] in CSR format.

    The layer flattens its input and applies ReLU if the original layer does (see common/models/networks.py). The layer
    computes (weight @ x.T).T, which is five times as fast as F.linear, because F.linear has the sparse matrix as
    its right factor.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        rows = layer.weight.detach().to_sparse_csr()
        row_indices = rows.crow_indices().int()  # MKL's kernels require int32
        column_indices = rows.col_indices().int()
        weight = torch.sparse_csr_tensor(row_indices, column_indices, rows.values(), size=rows.shape)
        self.register_buffer("weight", weight)
        self.bias = layer.bias
        self.flattens = isinstance(layer, FlatLinearReLU)
        self.relu = isinstance(layer, LinearReLU)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_buffer("weight")
        if self.flattens:
            x = x.flatten(1)
        logits = (weight @ x.flatten(0, -2).t()).t().unflatten(0, x.shape[:-1])
        if self.bias is not None:
            logits = logits + self.bias
        return logits.relu() if self.relu else logits


def convert_to_csr(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which linear layers are stored and computed in CSR format.

    The model must not have masks.
    """
    converted = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that CSR is in beta
        for name, layer in list(converted.named_modules()):
            if isinstance(layer, nn.Linear):
                converted.set_submodule(name, CsrLinear(layer))
    return converted


def has_two_of_four_sparsity(weight: Tensor) -> bool:
    """Return whether a weight [out, in] has the sparsity pattern 2:4.

    In the pattern 2:4, at most two weights in each group of four consecutive weights of a row are nonzero.
    """
    if weight.size(1) % 4:
        return False
    counts = weight.unflatten(1, (-1, 4)).count_nonzero(2)
    return bool((counts <= 2).all())


def convert_to_two_of_four(model: nn.Module) -> nn.Module:
    """Return a float16 copy of a model whose 2:4 linear layers use sparse tensor cores.

    NVIDIA GPUs have had sparse tensor cores since the Ampere generation. A layer stays dense if its weight does not
    have the pattern 2:4 (Mishra et al. 2021, arXiv 2104.08378) or if the kernels do not support the shape of its
    weight.
    """
    from torch.sparse import to_sparse_semi_structured

    converted = copy.deepcopy(model).half()
    for layer in converted.modules():
        if isinstance(layer, nn.Linear) and has_two_of_four_sparsity(layer.weight):
            with contextlib.suppress(RuntimeError, ValueError):
                layer.weight = nn.Parameter(to_sparse_semi_structured(layer.weight), requires_grad=False)
    return converted


# ---- time of a forward pass


def time_variants_in_turns(variants: Mapping[str, Callable[[], Tensor]], device: torch.device) -> dict[str, float]:
    """Return the median time of one call of each variant, in seconds.

    The variants are timed in turn in each of several rounds, so that a change of the machine's speed affects all
    variants. Slow variants are timed in fewer rounds.
    """

    def time_turn(variant: Callable[[], Tensor], count: int) -> float:
        def repeat() -> None:
            for _ in range(count):
                variant()

        (seconds,) = time_calls(repeat, device, repeats=1, warm_up=0)
        return seconds / count

    samples: dict[str, list[float]] = {name: [] for name in variants}
    with torch.no_grad():
        for variant in variants.values():
            time_turn(variant, 2)  # warm-up
        estimates = {name: time_turn(variant, 2) for name, variant in variants.items()}
        rounds = ROUNDS if sum(estimates.values()) < 1 else SLOW_ROUNDS
        for _ in range(rounds):
            for name, variant in variants.items():
                count = max(1, int(MIN_TURN_SECONDS / estimates[name]))
                samples[name].append(time_turn(variant, count))
    return {name: median(seconds) for name, seconds in samples.items()}


def time_inference(model: nn.Module, x: Tensor, smaller: nn.Module) -> dict[str, float]:
    """Return the time of a forward pass for x [N, ...] with each variant of a model, in seconds.

    The variants are the dense model in float32, `smaller`, the model without zero channels, the dense model in bf16,
    and the model with linear layers in CSR format. On a GPU with sparse tensor cores, there are two more variants in
    float16: the dense model and the model with 2:4 linear layers. Custom networks may not support some variants, which
    are then omitted. `model` must not have masks.
    """
    is_float = x.is_floating_point()  # tokens are not converted
    converted = {
        "bf16": (copy.deepcopy(model).bfloat16(), x.bfloat16() if is_float else x),
        "csr": (convert_to_csr(model), x),
    }
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= SPARSE_TENSOR_CORES:
        half = x.half() if is_float else x
        converted["fp16"] = (copy.deepcopy(model).half(), half)
        converted["two_of_four"] = (convert_to_two_of_four(model), half)
    variants = {"fp32": partial(model, x), "smaller": partial(smaller, x)}
    for name, (variant, inputs) in converted.items():
        with contextlib.suppress(RuntimeError), torch.no_grad():
            variant(inputs[:1])
            variants[name] = partial(variant, inputs)
    return time_variants_in_turns(variants, x.device)


# ---- all savings, as numbers and as text


def measure_sizes(model: nn.Module, accuracy: Callable[[nn.Module], float | None] | None) -> dict[str, Any]:
    """Return the file sizes of a model without masks, and the file size and accuracy of an int8 copy of the model.

    `accuracy` is a function that returns the test accuracy of a model, or None if its outputs are not the scores of
    classes. If `accuracy` is None or torchao is not installed, no int8 copy is measured.
    """
    raw, compressed = measure_file_sizes(model)
    csr, _ = measure_file_sizes(convert_to_csr(model))
    sizes: dict[str, Any] = {"bytes_raw": raw, "bytes_compressed": compressed, "bytes_csr": csr}
    if accuracy is not None and int8.has_torchao():
        quantized = int8.quantize_to_int8(model)
        raw, compressed = measure_file_sizes(quantized)
        sizes["int8_accuracy"] = accuracy(quantized)
        sizes |= {"int8_bytes_raw": raw, "int8_bytes_compressed": compressed}
    return sizes


def export_and_compare(model: nn.Module, exported: nn.Module, x: Tensor, path: Path) -> dict[str, Any]:
    """Export a model, run the exported model in a new process, and compare its outputs for x with those of `model`.

    If the export fails, the result describes the failure, and the run continues.
    """
    try:
        with torch.no_grad():
            expected = model(x).cpu()
        outputs = exporting.write_and_run_torch_export(exported, x, path)
        difference = float((outputs - expected).abs().max())
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return {"export_problem": summarize_error(error)}
    return {"export": str(path), "export_bytes": path.stat().st_size, "export_difference": difference}


def format_savings(facts: Mapping[str, Any], samples: int, with_int8: bool) -> dict[str, str]:
    """Return the rows of the final table that describe the savings.

    `facts` contains the sizes, times, and accuracies that were measured. The times are those of a forward pass for
    `samples` samples.
    """
    csr = facts.get("csr_seconds")
    fp32 = facts["fp32_seconds"]
    bf16 = facts.get("bf16_seconds")
    unavailable = "not available for this network"

    def compare(dense: float, csr: float) -> str:
        return f"{dense / csr:.1f} x faster" if csr < dense else f"{csr / dense:.1f} x slower"

    def format_size(prefix: str) -> str:
        return f"{facts[f'{prefix}bytes_raw']:,} bytes, {facts[f'{prefix}bytes_compressed']:,} compressed"

    bf16_time = unavailable if bf16 is None else f"{bf16 * 1e3:.3g} ms"
    times = f"dense fp32 {fp32 * 1e3:.3g} ms, dense bf16 {bf16_time}, linear layers in CSR"
    comparison = unavailable
    if csr is not None:
        comparison = f"{csr * 1e3:.3g} ms: CSR is {compare(fp32, csr)} than fp32"
        if bf16 is not None:
            comparison += f" and {compare(bf16, csr)} than bf16"
    rows = {
        "file": f"{format_size('')}; {facts['bytes_csr']:,} bytes in CSR",
        format_count(samples, "sample"): f"{times} {comparison}",
    }
    kept = facts["parameters_of_kept_channels"]
    if kept < facts["parameters"]:
        smaller = f"{kept:,} of {facts['parameters']:,} parameters, {facts['smaller_seconds'] * 1e3:.3g} ms"
        rows["channels"] = f"without those whose weights are zero: {smaller}"
    if with_int8:
        rows["int8"] = int8.MISSING_TORCHAO
    if "int8_accuracy" in facts:
        accuracy = facts["int8_accuracy"]
        score = "" if accuracy is None else f"{accuracy:.2%} test accuracy, "
        rows["int8"] = f"{score}{format_size('int8_')}"
    if "two_of_four_seconds" in facts and "fp16_seconds" in facts:
        dense = facts["fp16_seconds"]
        sparse = facts["two_of_four_seconds"]
        times = f"dense fp16 {dense * 1e3:.3g} ms, sparse tensor cores {sparse * 1e3:.3g} ms"
        rows["2:4"] = f"{times}: {dense / sparse:.2f} times as fast"
    if "export_problem" in facts:
        rows["exported"] = f"failed: {facts['export_problem']}"
    if "export" in facts:
        rows["exported"] = f"{facts['export']}; in a new process, outputs differ by {facts['export_difference']:g}"
    return rows


def report_savings(
    cfg: Config, model: nn.Module, masks: Masks, x: Tensor, accuracy: Callable[[nn.Module], float | None], path: Path
) -> ReportData:
    """Return the report of a pruned model: the remaining weights and the savings.

    Times are measured for the samples x [N, ...]. `accuracy` is a function that returns the test accuracy of a model.
    The exported model is written to `path`.
    """
    stripped = strip_masks(model)
    sizes = measure_sizes(stripped, accuracy if cfg.int8 else None)
    smaller = remove_zero_channels(stripped, x[:1])
    sizes["parameters"] = count_parameters(stripped)
    sizes["parameters_of_kept_channels"] = count_parameters(smaller)
    seconds = time_inference(stripped, x, smaller)
    measured: dict[str, Any] = {f"{name}_seconds": value for name, value in seconds.items()}
    if cfg.export:
        measured |= export_and_compare(stripped, smaller, x[:EXPORT_SAMPLES], path)
    nonzero = sum(map(count_nonzero, masks.weights))
    digest = masks.compute_digest()
    outcome = {
        "weights": masks.weight_count,
        "nonzero": nonzero,
        "sparsity": 1 - nonzero / masks.weight_count,
        "masks": digest,
    }
    rows = {
        "pruning": f"{get_network_name(cfg.model)}, {cfg.schedule}, {cfg.criterion}, {cfg.scope}",
        "weights": f"{nonzero:,} of {masks.weight_count:,} are nonzero; {masks.sparsity:.2%} are masked",
        "masks": digest[:16] + (f", identical on {cfg.processes} ranks" if cfg.processes > 1 else ""),
    }
    rows |= format_savings(sizes | measured, len(x), cfg.int8)
    return ReportData(rows, outcome | sizes, measured)
