"""Export of trained models to files for other programs.

The functions in WRITERS also run the exported file and return its outputs, so that the caller can check the outputs.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.system.errors import UserError, summarize_error

PROCESS_TIMEOUT = 300  # in seconds; importing torch from a slow disk takes a long time
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PROJECT_PACKAGES = ("common", "configs", "experiments", "slurm")

# Program that runs an exported model in a new process. The program imports torch, but nothing from this project.
RUN_PROGRAM = f"""
import sys, torch
program_file, input_file, output_file = sys.argv[1:]
model = torch.export.load(program_file).module()
with torch.no_grad():
    torch.save(model(torch.load(input_file, weights_only=True)), output_file)
imported = {{name.partition(".")[0] for name in sys.modules}}.intersection({PROJECT_PACKAGES})
sys.exit(f"the exported program imports {{sorted(imported)}}" if imported else 0)
"""


def compute_outputs(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and the outputs of a model for these inputs.

    The inputs are x [n, ...], or zeros if the model does not accept x. For example, a custom network may use floats as
    indices. Raises UserError if the model does not accept zeros.
    """
    with torch.no_grad(), contextlib.suppress(Exception):
        return x, model(x)
    try:
        with torch.no_grad():
            return torch.zeros_like(x), model(torch.zeros_like(x))
    except Exception as error:  # noqa: BLE001 (custom networks raise any type of error)
        problem = f"the model accepts neither random inputs nor zeros of shape {list(x.shape)}"
        raise UserError(f"{problem}: {summarize_error(error)}; use FORMAT=safetensors") from None


def draw_inputs(facts: Mapping[str, Any], count: int) -> Tensor:
    """Draw random inputs [count, ...] for the model that model.json describes: tokens or normalized values."""
    generator = torch.Generator().manual_seed(0)
    size = (count, *facts["shape"])
    preprocessing = facts.get("preprocessing", {})
    if preprocessing.get("dtype") == "int64":
        lowest, highest = preprocessing["value_range"]
        return torch.randint(lowest, highest + 1, size, generator=generator)
    return torch.randn(size, generator=generator, dtype=getattr(torch, facts["dtype"]))


def write_and_run_torch_export(model: nn.Module, x: Tensor, path: Path) -> Tensor:
    """Export a model with torch.export, and return the exported model's outputs for x [n, ...].

    The model must be in eval mode. The exported model is written to `path` and accepts inputs [N, ...] with any number
    of samples N. A new process loads the file and computes the outputs. Raises RuntimeError if the new process fails.
    """
    program = torch.export.export(model.cpu(), **make_export_arguments(x))
    torch.export.save(program, path)
    return run_exported_program_in_new_process(path, x)


def make_export_arguments(x: Tensor) -> dict[str, Any]:
    """Return arguments for exporting a model with a variable number of samples.

    The exported model accepts inputs [N, ...] with any number of samples N. The dtype and all other dimensions are
    those of x [n, ...]. The example input has two samples, because an export with one sample would fix N at 1.
    """
    zeros = torch.zeros(2, *x.shape[1:], dtype=x.dtype)
    samples = torch.export.Dim("samples", min=1)
    return {"args": (zeros,), "dynamic_shapes": ({0: samples},)}


def run_exported_program_in_new_process(path: Path, x: Tensor) -> Tensor:
    """Return an exported program's outputs for x [n, ...], computed in a new process.

    The new process imports nothing from this project. Raises RuntimeError if the process fails, and
    subprocess.TimeoutExpired after PROCESS_TIMEOUT seconds.
    """
    input_file = path.with_suffix(".in.pt")
    output_file = path.with_suffix(".out.pt")
    files = (path.absolute(), input_file.absolute(), output_file.absolute())
    command = [sys.executable, "-P", "-c", RUN_PROGRAM, *map(str, files)]
    try:
        torch.save(x.cpu().clone(), input_file)
        # The new process runs in the folder of the exported file.
        completed = subprocess.run(
            command, cwd=path.parent, capture_output=True, text=True, timeout=PROCESS_TIMEOUT, check=False
        )
        if completed.returncode:
            raise RuntimeError(f"{path} does not run in a new process: {completed.stderr.strip()}")
        outputs: Tensor = torch.load(output_file, weights_only=True)
        return outputs
    finally:
        input_file.unlink(missing_ok=True)
        output_file.unlink(missing_ok=True)


def write_and_run_onnx(model: nn.Module, x: Tensor, path: Path) -> Tensor:
    """Export a model to ONNX, and return ONNX Runtime's outputs for x [n, ...].

    The model must be in eval mode. The exported model is written to `path` and accepts inputs [N, ...] with any number
    of samples N. Raises UserError if one of the packages ONNX_PACKAGES is missing.
    """
    try:
        # All packages are imported to find out whether one is missing. The last package is onnxruntime.
        runtime: Any = [importlib.import_module(name) for name in ONNX_PACKAGES][-1]
    except ImportError as error:
        command = f".venv/bin/python -m pip install {' '.join(ONNX_PACKAGES)}"
        raise UserError(f"FORMAT=onnx needs the package {error.name}; install it with {command}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings concern the exporter, not the model
        program = torch.onnx.export(
            model.cpu(), **make_export_arguments(x), dynamo=True, input_names=["images"], verbose=False
        )
    assert program is not None
    program.save(path)
    if data_files := list(path.parent.glob(f"{path.name}?*")):
        size = data_files[0].stat().st_size / 1e9
        raise UserError(f"the weights ({size:.1f} GB) do not fit into one ONNX file; use FORMAT=torch.export")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    input_name = session.get_inputs()[0].name
    (outputs,) = session.run(None, {input_name: x.numpy()})
    return torch.from_numpy(outputs)


WRITERS: dict[str, Callable[[nn.Module, Tensor, Path], Tensor]] = {
    "torch.export": write_and_run_torch_export,
    "onnx": write_and_run_onnx,
}
