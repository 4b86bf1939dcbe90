"""Export of a trained model for other programs, checked in a process without this project."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.core.errors import UserError

PATIENCE = 300  # seconds for the other process, which imports torch, perhaps from a slow disk
ONNX = ("onnx", "onnxscript", "onnxruntime")

# the program of the other process, which imports torch and nothing of this project
RUN = """
import sys, torch
program, given, answer = sys.argv[1:]
model = torch.export.load(program).module()
with torch.no_grad():
    torch.save(model(torch.load(given, weights_only=True)), answer)
ours = {"common", "configs", "experiments", "slurm"} & {name.partition(".")[0] for name in sys.modules}
sys.exit(f"it imports {sorted(ours)}" if ours else 0)
"""


def write_and_run_torch_export(model: nn.Module, x: Tensor, path: Path) -> Tensor:
    """Write a model in eval mode with torch.export, for inputs [any N, ...] like x [n, ...].

    Returns the outputs for x that a new process computes from the file alone. Raises RuntimeError if that fails.
    """
    program = torch.export.export(model.cpu(), **make_export_inputs(x))
    torch.export.save(program, path)
    return run_in_new_process(path, x)


def make_export_inputs(x: Tensor) -> dict[str, Any]:
    """Return the arguments of an export for inputs [any N, ...] like x [n, ...]; one sample would fix N at 1."""
    zeros = torch.zeros(2, *x.shape[1:], dtype=x.dtype)
    return {"args": (zeros,), "dynamic_shapes": ({0: torch.export.Dim("samples", min=1)},)}


def run_in_new_process(path: Path, x: Tensor) -> Tensor:
    """Return a program's outputs for x [n, ...], computed by a new process that imports nothing of this project.

    Raises RuntimeError if that fails, subprocess.TimeoutExpired after PATIENCE seconds.
    """
    given, answer = path.with_suffix(".in.pt"), path.with_suffix(".out.pt")
    try:
        torch.save(x.cpu().clone(), given)
        words = [sys.executable, "-P", "-c", RUN, *(str(file.absolute()) for file in (path, given, answer))]
        done = subprocess.run(  # not in this project's folder
            words, cwd=path.parent, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{path} cannot be run by itself: {done.stderr.strip()}")
        found: Tensor = torch.load(answer, weights_only=True)
        return found
    finally:
        given.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


def write_and_run_onnx(model: nn.Module, x: Tensor, path: Path) -> Tensor:
    """Write a model in eval mode as ONNX, for inputs [any N, ...]; returns onnxruntime's outputs for x [n, ...].

    Raises UserError if the optional packages are missing.
    """
    try:
        runtime: Any = [importlib.import_module(name) for name in ONNX][-1]
    except ImportError as error:
        raise UserError(f"FORMAT=onnx needs {error.name}: .venv/bin/python -m pip install {' '.join(ONNX)}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter itself
        made = torch.onnx.export(
            model.cpu(), **make_export_inputs(x), dynamo=True, input_names=["images"], verbose=False
        )
    assert made is not None
    made.save(path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


WRITERS: dict[str, Callable[[nn.Module, Tensor, Path], Tensor]] = {
    "torch.export": write_and_run_torch_export,
    "onnx": write_and_run_onnx,
}
