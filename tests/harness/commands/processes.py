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
from tests.harness.commands import execution, forked_process
from tests.harness.repository import ROOT

Settings = tuple[str, ...]
"""Settings of a run, each `key=value`."""

WAIT_TIMEOUT = 200.0
"""Seconds for which tests wait: longer than a busy machine needs, and shorter than endless runs."""


def wait_until(
    condition: Callable[[], Any], description: str, seconds: float = WAIT_TIMEOUT, pause: float = 0.05
) -> Any:
    """Wait until a condition holds and return its value. Raises TimeoutError with the description."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {description}")
        time.sleep(pause)
    return value


def write_script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def get_only_run(runs: Path) -> RunFolder:
    """Return the run in a folder that contains a single run."""
    (path,) = runs.iterdir()
    return RunFolder(path)


@dataclass
class FinishedRun:
    """The exit status and output of a script that has trained, and the folder with its run."""

    returncode: int
    stdout: str
    stderr: str
    runs: Path

    @property
    def folder(self) -> RunFolder:
        """The only run folder."""
        return get_only_run(self.runs)

    @property
    def result(self) -> dict[str, Any]:
        """The values of the result, by name."""
        return read_result_values(self.folder)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.folder.read_metrics() if "loss" in row]


def read_result_values(folder: RunFolder) -> dict[str, Any]:
    """Return the values of the result of a run, by name."""
    return parse_result(folder.result).flatten_values()


def make_environment(**extra: str) -> dict[str, str]:
    """Return the environment of this process without variables that change a run, such as those of W&B and SLURM."""
    dropped_prefixes = ("WANDB_", "FORK_SERVER_", "SLURM_", "TORCHELASTIC_", "DATA_ROOT", "MAKE", "MFLAGS")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped_prefixes)}
    variables["WANDB_MODE"] = "disabled"
    variables["CLUSTER_DIR"] = "/no/cluster"
    return variables | extra


def select_applicable_settings(name: str, settings: Iterable[str]) -> list[str]:
    """Return the settings that an experiment has. A pure measurement has no settings of training."""
    if name not in config.list_experiments():
        return list(settings)
    keys = config_keys.list_training_keys(config.import_schema(name))
    return [setting for setting in settings if setting.partition("=")[0] not in keys]


def make_run_command(name: str, *settings: str, runs: Path) -> list[str]:
    """Return the command line that trains an experiment."""
    script = str(ROOT / "experiments" / f"{name}.py")
    applicable_settings = select_applicable_settings(name, settings)
    return [sys.executable, script, f"runs={runs}", *applicable_settings]


def run_experiment(
    name: str,
    *settings: str,
    runs: Path,
    timeout: float = 120,
    real_process: bool = False,
    status: int | None = 0,
    **env: Any,
) -> FinishedRun:
    """Execute the script of an experiment until it exits, as a real process or as a fork of the fork server.

    Its exit status is checked, unless `status` is None.
    """
    argv = make_run_command(name, *settings, runs=runs)
    environment = make_environment(**env)
    process = execution.execute_command(
        argv, env=environment, timeout=timeout, real_process=real_process, status=status
    )
    return FinishedRun(process.returncode, process.stdout, process.stderr, runs)


def execute_verb(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> CompletedProcess[str]:
    """Execute `python -m slurm` with these arguments. The other options are those of execution.execute_command."""
    argv = [sys.executable, "-m", "slurm", *arguments]
    return execution.execute_command(argv, env=make_environment() if env is None else env, **options)


def find_processes(marker: str) -> list[int]:
    """Return the ids of running processes with `marker`, such as a path, in their command line or environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes()
            text += (entry / "environ").read_bytes()
            text += read_forked_command(entry)
            process_status = (entry / "status").read_text()
        except OSError:
            continue
        is_zombie = "\nState:\tZ" in process_status
        if marker.encode() in text and not is_zombie:
            pids.append(int(entry.name))
    return pids


def read_forked_command(entry: Path) -> bytes:
    """Return the command line and environment of a fork of the fork server; empty for other processes."""
    for descriptor in (entry / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            if f"/memfd:{forked_process.COMMAND_FILE_NAME} " in f"{descriptor.readlink()} ":
                return descriptor.read_bytes()
    return b""
