"""Running the project through its public ways in, and reading what a run leaves behind."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import config, config_keys
from common.runs.folder import RunFolder
from common.runs.result import parse_result
from tests.harness import warm, warm_command
from tests.harness.warm import ROOT

PATIENCE = 200.0
"""Seconds until a test gives up waiting: far more than a busy machine needs, and less than endless runs take."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE, pause: float = 0.05) -> Any:
    """Wait until a condition holds; returns its value. Raises TimeoutError, which says what was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(pause)
    return value


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@dataclass
class Done:
    """A finished command."""

    status: int
    out: str
    err: str
    runs: Path

    @property
    def folder(self) -> RunFolder:
        """The one run folder it made."""
        (path,) = self.runs.iterdir()
        return RunFolder(path)

    @property
    def result(self) -> dict[str, Any]:
        """Every value of its result, by name."""
        return values_of(self.folder)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.folder.read_metrics() if "loss" in row]


def values_of(folder: RunFolder) -> dict[str, Any]:
    """Every value of a run's result, by name."""
    return parse_result(folder.result).flatten_values()


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without what would change a run: no W&B, no cluster that happens to be up."""
    foreign = ("WANDB_", "WARM_", "SLURM_", "TORCHELASTIC_", "DATA_ROOT", "MAKE", "MFLAGS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return kept | {"WANDB_MODE": "disabled", "CLUSTER_DIR": "/no/cluster"} | extra


def applicable(name: str, settings: Iterable[str]) -> list[str]:
    """The settings without those of training, if the experiment trains nothing."""
    keys = config_keys.list_training_keys(config.import_schema(name)) if name in config.list_experiments() else ()
    return [setting for setting in settings if setting.partition("=")[0] not in keys]


def command(name: str, *settings: str, runs: Path) -> list[str]:
    return [sys.executable, str(ROOT / "experiments" / f"{name}.py"), f"runs={runs}", *applicable(name, settings)]


def run(name: str, *settings: str, runs: Path, timeout: float = 120, real: bool = False, **env: Any) -> Done:
    """Run an experiment's script to its end, as a process of its own if `real`, else as a fork of a warm one."""
    line = command(name, *settings, runs=runs)
    done = warm.execute(line, env=environment(**env), timeout=timeout, real=real)
    return Done(done.returncode, done.stdout, done.stderr, runs)


def processes_of(marker: str) -> list[int]:
    """The pids of running processes whose command line or environment holds `marker`, such as a run folder's path."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes() + told(entry)
                alive = "\nState:\tZ" not in (entry / "status").read_text()
            except OSError:
                continue
            if alive and marker.encode() in text:
                found.append(int(entry.name))
    return found


def told(entry: Path) -> bytes:
    """The command line and environment of a command that was forked by the warm server, or of its forks."""
    for descriptor in (entry / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed since
            if f"/memfd:{warm_command.COMMAND} " in f"{descriptor.readlink()} ":
                return descriptor.read_bytes()
    return b""
