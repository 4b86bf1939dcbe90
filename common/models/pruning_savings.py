"""Savings of a pruned model: bytes of its file, and time of its forward.

torch has sparse kernels for linear layers only: these are computed in CSR, convolutions stay dense.
"""

from __future__ import annotations

import contextlib
import copy
import io
import subprocess
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from common.core.errors import summarize_error
from common.core.text import format_count
from common.measure.timing import time_calls
from common.models import exporting, int8
from common.models.networks import LinearReLU
from common.models.pruning_masks import MASK, Masks, count_nonzero
from common.runs.result import Facts
from configs.sparse_prune import Config

ROUNDS, TURN = 9, 4e-3  # of timing: turns of each side, and the least seconds of a turn


def strip_masks(model: nn.Module) -> nn.Module:
    """Return a copy in float32 and eval mode, without masks and gradients."""
    found = copy.deepcopy(model).float().eval().requires_grad_(False)
    for module in found.modules():
        module._buffers.pop(MASK, None)
    for parameter in found.parameters():
        parameter.grad = None
        parameter.add_(0.0)  # turns the -0.0 of masked negative weights into 0.0: random signs compress badly
    return found


# ---- bytes


def measure_file_sizes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the model's file as torch.save writes it, and of the same compressed by zlib."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that CSR is in beta
        torch.save(model.state_dict(), file)
    return file.tell(), len(zlib.compress(file.getvalue()))


class CsrLinear(nn.Module):
    """A linear layer whose weight [out, in] is stored in CSR; keeps the flattening and the ReLU of our layers.

    Computes (weight @ x.T).T: five times as fast as F.linear, which multiplies by the sparse matrix from the right.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        rows = layer.weight.detach().to_sparse_csr()
        parts = rows.crow_indices().int(), rows.col_indices().int(), rows.values()  # MKL's kernels take int32
        self.register_buffer("weight", torch.sparse_csr_tensor(*parts, size=rows.shape))
        self.bias = layer.bias
        self.relu = isinstance(layer, LinearReLU)

    def forward(self, x: Tensor) -> Tensor:
        out = (self.get_buffer("weight") @ x.flatten(1).t()).t() + self.bias
        return out.relu() if self.relu else out


def convert_to_csr(model: nn.Module) -> nn.Module:
    """Return a copy of a model without masks whose linear layers are stored and computed in CSR."""
    found = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that CSR is in beta
        for name, layer in list(found.named_modules()):
            if isinstance(layer, nn.Linear):
                found.set_submodule(name, CsrLinear(layer))
    return found


def is_two_of_four(weight: Tensor) -> bool:
    """Return whether a weight [out, in] is 2:4: at most two of each four neighbours in a row are not zero."""
    return weight.size(1) % 4 == 0 and bool((weight.unflatten(1, (-1, 4)).count_nonzero(2) <= 2).all())


def convert_to_two_of_four(model: nn.Module) -> nn.Module:
    """Return a float16 copy whose 2:4 linear layers run on the sparse tensor cores of an NVIDIA GPU (Ampere, newer).

    Layers that are not 2:4, or of a shape that the kernels refuse, stay dense. 2:4: Mishra et al. 2021, arXiv
    2104.08378.
    """
    from torch.sparse import to_sparse_semi_structured

    found = copy.deepcopy(model).half()
    for layer in found.modules():
        if isinstance(layer, nn.Linear) and is_two_of_four(layer.weight):
            with contextlib.suppress(RuntimeError, ValueError):
                layer.weight = nn.Parameter(to_sparse_semi_structured(layer.weight), requires_grad=False)
    return found


# ---- time


def time_in_turns(sides: Mapping[str, Callable[[], Tensor]], device: torch.device) -> dict[str, float]:
    """Return the median seconds of one call of each side; the sides take turns. Slow sides take fewer turns."""

    def time_turn(side: Callable[[], Tensor], count: int) -> float:
        def repeat() -> None:
            for _ in range(count):
                side()

        return time_calls(repeat, device, repeats=1, warm_up=0)[0] / count

    taken: dict[str, list[float]] = {name: [] for name in sides}
    with torch.no_grad():
        for side in sides.values():
            time_turn(side, 2)
        first = {name: time_turn(side, 2) for name, side in sides.items()}
        counts = {name: max(1, int(TURN / once)) for name, once in first.items()}
        for _ in range(ROUNDS if sum(first.values()) < 1 else 3):
            for name, side in sides.items():
                taken[name].append(time_turn(side, counts[name]))
    return {name: median(values) for name, values in taken.items()}


def time_inference(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Return the seconds of a forward on x [N, ...]: dense in float32 and bf16, and with linear layers in CSR.

    On a GPU with sparse tensor cores also in float16, dense and with 2:4 linear layers. `model` has no masks.
    """
    brain, low, sparse = copy.deepcopy(model).bfloat16(), x.bfloat16(), convert_to_csr(model)
    sides = {"fp32": lambda: model(x), "bf16": lambda: brain(low), "csr": lambda: sparse(x)}
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0):
        half, lower, thin = copy.deepcopy(model).half(), x.half(), convert_to_two_of_four(model)
        sides |= {"fp16": lambda: half(lower), "two_of_four": lambda: thin(lower)}
    return time_in_turns(sides, x.device)


# ---- all savings, as numbers and as text


def measure_sizes(model: nn.Module, accuracy: Callable[[nn.Module], float] | None) -> dict[str, Any]:
    """Return the bytes of a model without masks, and with `accuracy` bytes and accuracy of its int8 copy.

    `accuracy` returns a model's test accuracy. Without torchao there is no int8 copy.
    """
    raw, squeezed = measure_file_sizes(model)
    sparse, _ = measure_file_sizes(convert_to_csr(model))
    sizes: dict[str, Any] = {"bytes_raw": raw, "bytes_compressed": squeezed, "bytes_csr": sparse}
    if accuracy is not None and int8.has_torchao():
        small = int8.quantize_to_int8(model)
        raw, squeezed = measure_file_sizes(small)
        sizes |= {"int8_accuracy": accuracy(small), "int8_bytes_raw": raw, "int8_bytes_compressed": squeezed}
    return sizes


def export_and_compare(model: nn.Module, x: Tensor, path: Path) -> dict[str, Any]:
    """Export a model and compare its outputs in a new process; a failure is reported and does not fail the run."""
    try:
        with torch.no_grad():
            expected = model(x).cpu()
        answer = exporting.write_and_run_torch_export(model, x, path)
        difference = float((answer - expected).abs().max())
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return {"export_problem": summarize_error(error)}
    return {"export": str(path), "export_bytes": path.stat().st_size, "export_difference": difference}


def format_savings(facts: Mapping[str, Any], samples: int, with_int8: bool) -> dict[str, str]:
    """Return the rows of the final table; `facts` are sizes and measured values, times of `samples` samples."""
    csr, fp32, bf16 = (facts[f"{name}_seconds"] for name in ("csr", "fp32", "bf16"))

    def compare(dense: float) -> str:
        return f"{dense / csr:.1f} x faster" if csr < dense else f"{csr / dense:.1f} x slower"

    raw, squeezed = (f"{facts[name]:,}" for name in ("bytes_raw", "bytes_compressed"))
    times = f"dense fp32 {fp32 * 1e3:.3g} ms, dense bf16 {bf16 * 1e3:.3g}, linear layers in CSR {csr * 1e3:.3g}"
    found = {
        "file": f"{raw} bytes, compressed {squeezed}; in CSR {facts['bytes_csr']:,}",
        format_count(samples, "sample"): f"{times}: sparse is {compare(fp32)} than fp32, {compare(bf16)} than bf16",
    }
    if with_int8:
        found["int8"] = int8.MISSING
    if "int8_accuracy" in facts:
        raw, squeezed = (f"{facts[name]:,}" for name in ("int8_bytes_raw", "int8_bytes_compressed"))
        found["int8"] = f"{facts['int8_accuracy']:.2%} test accuracy, {raw} bytes, compressed {squeezed}"
    if "two_of_four_seconds" in facts:
        dense, thin = facts["fp16_seconds"], facts["two_of_four_seconds"]
        found["2:4"] = f"dense fp16 {dense * 1e3:.3g} ms, sparse tensor cores {thin * 1e3:.3g}: {dense / thin:.2f} x"
    if "export_problem" in facts:
        found["exported"] = f"not done: {facts['export_problem']}"
    if "export" in facts:
        found["exported"] = f"{facts['export']}; run elsewhere, outputs differ by {facts['export_difference']:g}"
    return found


def report_savings(
    cfg: Config, model: nn.Module, masks: Masks, x: Tensor, accuracy: Callable[[nn.Module], float], path: Path
) -> Facts:
    """Report what pruning has left of a trained model, and what that saves, timed on the samples x [N, ...].

    `accuracy` returns a model's test accuracy; `path` is where the exported model goes.
    """
    bare, digest = strip_masks(model), masks.compute_digest()
    sizes = measure_sizes(bare, accuracy if cfg.int8 else None)
    measured: dict[str, Any] = {f"{name}_seconds": seconds for name, seconds in time_inference(bare, x).items()}
    if cfg.export:
        measured |= export_and_compare(bare, x[:7], path)
    nonzero = sum(map(count_nonzero, masks.weights))
    outcome = {"weights": masks.total, "nonzero": nonzero, "sparsity": 1 - nonzero / masks.total, "masks": digest}
    shown = {
        "pruning": f"{cfg.model}, {cfg.schedule}, {cfg.criterion}, {cfg.scope}",
        "weights": f"{nonzero:,} of {masks.total:,} are not zero; {masks.sparsity:.2%} are masked",
        "masks": digest[:16] + (f", the same on {cfg.processes} ranks" if cfg.processes > 1 else ""),
    }
    return Facts(shown | format_savings(sizes | measured, len(x), cfg.int8), outcome | sizes, measured)
