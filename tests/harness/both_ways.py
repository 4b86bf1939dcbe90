"""A command as a fork of the warm server and as a real process, and what each leaves, without chance and place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch

from tests.harness import warm
from tests.harness.long_runs import only_folder
from tests.harness.processes import PATIENCE, environment

# what differs between two real processes, too: the clock, processes, memory, and what is made of them
BY_CHANCE = {
    "end", "idle_share", "memory", "pid", "pid_started", "rendezvous_seconds", "samples_per_second", "seconds",
    "start", "step_seconds", "time",
}  # fmt: skip
MEASURED = re.compile(
    r"^ +(throughput|idle share|pipeline) .*|^ +stage \d \|.*\|$|^\d{4}-\d\d-\d\d [\d:,]+", re.MULTILINE
)


def without_chance(value: Any, chance: set[str] = BY_CHANCE) -> Any:
    """A value as it is in every repetition: of what chance decides, only the kind is left."""
    if isinstance(value, dict):
        return {k: kind_of(v) if k in chance else without_chance(v, chance) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_chance(entry, chance) for entry in value]
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def kind_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kind_of(entry) for key, entry in value.items()}
    return [kind_of(entry) for entry in value] if isinstance(value, list) else type(value).__name__


def read(path: Path, runs: Path) -> Any:
    """What a file of a run says without chance and its own place."""
    if path.suffix == ".pt":
        return without_chance(torch.load(path, weights_only=True))
    if path.suffix == ".safetensors":
        return path.read_bytes()
    text = without_place(path.read_text(), runs)
    if path.suffix == ".jsonl":
        return [without_chance(json.loads(line)) for line in text.splitlines()]
    if path.name == "manifest.json":
        return without_chance(json.loads(text), BY_CHANCE | {"sha256"})  # of files that hold seconds
    return without_chance(json.loads(text)) if path.suffix == ".json" else MEASURED.sub("*", text)


def without_place(text: str, runs: Path) -> str:
    for folder in runs.iterdir() if runs.exists() else ():
        text = text.replace(folder.name, "RUN")
    return text.replace(str(runs), "RUNS")


def everything(runs: Path) -> dict[str, Any]:
    """All files of the one run in a folder."""
    path = only_folder(runs).path
    return {str(file.relative_to(path)): read(file, runs) for file in path.rglob("*") if file.is_file()}


def execute_both(argv: Callable[[Path], list[str]], place: Path) -> list[CompletedProcess[str]]:
    """A command as a fork and as a real process; outputs without chance and place."""
    found = []
    for name, real in (("fork", False), ("real", True)):
        done = warm.execute(argv(place / name), env=environment(), timeout=PATIENCE, real=real)
        done.stdout, done.stderr = (
            MEASURED.sub("*", without_place(text, place / name)) for text in (done.stdout, done.stderr)
        )
        found.append(done)
    return found
