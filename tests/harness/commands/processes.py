"""Run experiments as commands, and read the files of their runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from common.config import config, config_keys
from common.runs.folder import RunFolder
from common.runs.result import parse_result
from tests.harness.commands import warm, warm_fork
from tests.harness.commands.warm import ROOT

Settings = tuple[str, ...]
"""Settings of a run, each `key=value`."""

PATIENCE = 200.0
"""Seconds until a test stops waiting: more than a busy machine needs, and less than endless runs take."""


def wait_until(condition: Callable[[], Any], description: str, seconds: float = PATIENCE, pause: float = 0.05) -> Any:
    """Wait until a condition holds and return its value. Raises TimeoutError with the description."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {description}")
        time.sleep(pause)
    return value


def script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
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
        """The only run folder."""
        (path,) = self.runs.iterdir()
        return RunFolder(path)

    @property
    def result(self) -> dict[str, Any]:
        """The values of the run's result, by name."""
        return values_of(self.folder)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.folder.read_metrics() if "loss" in row]


def values_of(folder: RunFolder) -> dict[str, Any]:
    """Return the values of a run's result, by name."""
    return parse_result(folder.result).flatten_values()


def environment(**extra: str) -> dict[str, str]:
    """Return the caller's environment without variables that change a run: no W&B, no running cluster."""
    dropped_prefixes = ("WANDB_", "WARM_", "SLURM_", "TORCHELASTIC_", "DATA_ROOT", "MAKE", "MFLAGS")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped_prefixes)}
    return variables | {"WANDB_MODE": "disabled", "CLUSTER_DIR": "/no/cluster"} | extra


def applicable(name: str, settings: Iterable[str]) -> list[str]:
    """Return the settings without those of training, if the experiment is a pure measurement."""
    if name not in config.list_experiments():
        return list(settings)
    keys = config_keys.list_training_keys(config.import_schema(name))
    return [setting for setting in settings if setting.partition("=")[0] not in keys]


def command(name: str, *settings: str, runs: Path) -> list[str]:
    return [sys.executable, str(ROOT / "experiments" / f"{name}.py"), f"runs={runs}", *applicable(name, settings)]


def run(
    name: str,
    *settings: str,
    runs: Path,
    timeout: float = 120,
    real: bool = False,
    status: int | None = 0,
    **env: Any,
) -> Done:
    """Run an experiment's script to its end and check its exit status, unless `status` is None.

    The script is a real process if `real`, else a fork of the warm server.
    """
    argv = command(name, *settings, runs=runs)
    process = warm.execute(argv, env=environment(**env), timeout=timeout, real=real, status=status)
    return Done(process.returncode, process.stdout, process.stderr, runs)


def execute_verb(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> CompletedProcess[str]:
    """Execute `python -m slurm` with these arguments. The other options are those of warm.execute."""
    argv = [sys.executable, "-m", "slurm", *arguments]
    return warm.execute(argv, env=environment() if env is None else env, **options)


def processes_of(marker: str) -> list[int]:
    """Return the ids of running processes with `marker`, such as a path, in their command line or environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes() + read_forked_command(entry)
            is_zombie = "\nState:\tZ" in (entry / "status").read_text()
        except OSError:
            continue
        if marker.encode() in text and not is_zombie:
            pids.append(int(entry.name))
    return pids


def read_forked_command(entry: Path) -> bytes:
    """Return command line and environment of a process forked from the warm server, or nothing for other processes."""
    for descriptor in (entry / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            if f"/memfd:{warm_fork.COMMAND} " in f"{descriptor.readlink()} ":
                return descriptor.read_bytes()
    return b""
