"""Execute a command as a fork of the fork server and as a real process, and compare outputs and run folders.

Values that differ between any two runs, such as times, and the names of folders are replaced before the comparison.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch

from tests.harness.commands import execution
from tests.harness.commands.processes import WAIT_TIMEOUT, get_only_run, make_environment

VARYING_KEYS = {
    "end", "idle_share", "memory", "pid", "pid_started", "rendezvous_seconds", "samples_per_second", "seconds",
    "start", "step_seconds", "step_time", "time",
}  # fmt: skip
"""Keys of values that also differ between two real processes: times, process IDs and memory."""
MEASURED_OUTPUT = re.compile(
    r"^ +(throughput|idle share|pipeline) .*|^ +stage \d \|.*\|$|^\d{4}-\d\d-\d\d [\d:,]+", re.MULTILINE
)


def mask_varying(content: Any, varying_keys: set[str] = VARYING_KEYS) -> Any:
    """Replace the values of varying keys by their types."""
    if isinstance(content, dict):
        masked = {}
        for key, child in content.items():
            masked[key] = describe_types(child) if key in varying_keys else mask_varying(child, varying_keys)
        return masked
    if isinstance(content, list | tuple):
        return [mask_varying(child, varying_keys) for child in content]
    if isinstance(content, torch.Tensor):
        return content.dtype, content.tolist()
    return content


def describe_types(content: Any) -> Any:
    """Replace all values by the names of their types."""
    if isinstance(content, dict):
        return {key: describe_types(child) for key, child in content.items()}
    if isinstance(content, list):
        return [describe_types(child) for child in content]
    return type(content).__name__


def read_masked(path: Path, runs: Path) -> Any:
    """Read a file of a run, and mask varying values and folder names."""
    if path.suffix == ".pt":
        return mask_varying(torch.load(path, weights_only=True))
    if path.suffix == ".safetensors":
        return path.read_bytes()
    text = mask_folder_names(path.read_text(), runs)
    if path.suffix == ".jsonl":
        return [mask_varying(json.loads(line)) for line in text.splitlines()]
    if path.name == "manifest.json":
        return mask_varying(json.loads(text), VARYING_KEYS | {"sha256"})  # hashes of files that contain times
    if path.suffix == ".json":
        return mask_varying(json.loads(text))
    return MEASURED_OUTPUT.sub("*", text)


def mask_folder_names(text: str, runs: Path) -> str:
    """Replace the path of a runs folder and the names of its runs by fixed words."""
    for folder in runs.iterdir() if runs.exists() else ():
        text = text.replace(folder.name, "RUN")
    return text.replace(str(runs), "RUNS")


def read_all_files(runs: Path) -> dict[str, Any]:
    """Read all files of the only run in a folder."""
    path = get_only_run(runs).path
    contents = {}
    for file in path.rglob("*"):
        if file.is_file():
            name = str(file.relative_to(path))
            contents[name] = read_masked(file, runs)
    return contents


def execute_forked_and_real(argv: Callable[[Path], list[str]], folder: Path) -> list[CompletedProcess[str]]:
    """Execute a command as a fork and as a real process; return both with masked outputs."""
    processes = []
    for name, real in (("fork", False), ("real", True)):
        runs = folder / name
        process = execution.execute_command(argv(runs), env=make_environment(), timeout=WAIT_TIMEOUT, real_process=real)
        stdout = mask_folder_names(process.stdout, runs)
        stderr = mask_folder_names(process.stderr, runs)
        process.stdout = MEASURED_OUTPUT.sub("*", stdout)
        process.stderr = MEASURED_OUTPUT.sub("*", stderr)
        processes.append(process)
    return processes
