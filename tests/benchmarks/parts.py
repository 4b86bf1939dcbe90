"""The parts of a benchmark: comparisons whose sides take turns, each of which ends in one table."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.config import ROOT
from common.runs.folder import RunFolder, read_json
from common.runs.result import parse_result, read_cause
from common.system.causes import Cause
from common.system.errors import CausedRuntimeError
from tests.benchmarks.measure import Samples, Task, Team
from tests.benchmarks.records import Table
from tests.harness.commands.processes import select_applicable_settings

# Settings of trainings in a team. They do not print, track or save at intervals.
QUIET = ("log.progress=none", "log.level=error", "wandb.mode=disabled", "checkpoint.every_seconds=0")
BRIEF = ("data.test_limit=1000",)
RUN_SECONDS = 1800.0  # after which a run counts as hung


@dataclasses.dataclass(frozen=True)
class Part:
    """One comparison."""

    name: str
    """Its experiment or topic, a slash, and what is compared."""
    title: str
    sides: Callable[[Path], Sequence[Team | Task]]
    """The sides, given a scratch folder."""
    table: Callable[[Samples], Table]
    rounds: int = 5
    drop: int = 0
    """Rounds before these that warm up and do not count."""
    facts: Sequence[str] = ()
    """Conditions that the page lists below the table, such as `2 processes with 1 thread each` and `batch size 64`."""
    check: Callable[[Path, Samples], None] = lambda scratch, samples: None
    """Raises AssertionError if the sides did not do the same work."""
    missing: Callable[[], str] = lambda: ""
    """Returns why this machine cannot measure it; empty if it can."""
    attachments: Callable[[Path], dict[str, Any]] = lambda scratch: {}
    """Other content of the record, such as the timeline of a step."""


# ---- sides that are runs of experiments


def run_of(scratch: Path, label: str, experiment: str, *settings: str, keep: Sequence[str] = ()) -> Task:
    """A run of an experiment, started as a user starts it; its seconds are those of a training step.

    `keep` names further numbers of result.json; of a list, each entry is kept under its position. In `settings`,
    {round} stands for the number of the round. The losses of the first and the last step are always kept.
    """

    def run(number: int) -> dict[str, float]:
        settings_of_round = [setting.replace("{round}", str(number)) for setting in settings]
        folder = finish(scratch, label, experiment, *settings_of_round)
        result = parse_result(folder.result).flatten_values()
        losses = [row["loss"] for row in folder.read_metrics() if row.get("loss") is not None]
        measured = {"seconds": result["step_seconds"], "first_loss": losses[0], "last_loss": losses[-1]}
        for name in keep:
            measured |= flatten(name, result[name])
        if result.get("timeline"):
            (scratch / f"{label}.timeline").write_text(json.dumps(result["timeline"]))
        discard_run(folder)
        return measured

    return Task(label, run)


def ignore_other_programs(task: Task) -> Task:
    """Return a task of which no round counts as disturbed.

    This is correct if the table shows no times, but only numbers such as bytes and accuracies.
    """
    return Task(task.name, lambda number: {**task.run(number), "others": 0.0}, is_timed=False)


class RunFailedError(CausedRuntimeError):
    """A run has failed, with the cause in its result."""


def finish(
    scratch: Path, label: str, experiment: str, *settings: str, nodes: int = 0, env: Mapping[str, str] | None = None
) -> RunFolder:
    """Start a run by its command, wait for its end and return its folder. Raises RunFailedError if it failed.

    With `nodes` it is submitted to the cluster that `env` leads to.
    """
    runs = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
    arguments = select_applicable_settings(experiment, [*BRIEF, *settings, f"runs={runs}"])
    command = [sys.executable, f"experiments/{experiment}.py", *arguments]
    if nodes:
        options = [f"--nodes={nodes}", "--follow=1", f"--args={shlex.join(arguments)}"]
        command = [sys.executable, "-m", "slurm", "exp", *options, "--", experiment]
    env = dict(env or environment())
    process = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    if process.returncode:
        results = [read_json(file) for file in runs.glob("*/result.json")]
        cause = read_cause(results[0]) if results else Cause.OTHER
        raise RunFailedError(f"{label}: {' '.join(command)} failed:\n{process.stderr[-2000:]}", cause=cause)
    (path,) = (path for path in runs.iterdir() if path.is_dir())
    return RunFolder(path)


def discard_run(folder: RunFolder) -> None:
    """Delete the files of a run, except the copy of the source code.

    The copy consists of hundreds of small files. For some minutes after so many files have been deleted, ext4 creates
    files more slowly, which would slow down the beginning of the next run. The copies are deleted with `scratch`.
    """
    for path in folder.path.iterdir():
        if path.is_dir() and path.name != "code":
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()


def environment(wandb: str = "offline") -> dict[str, str]:
    """Return the environment of a run without variables of a cluster, an account or `make bench`; with W&B's mode."""
    foreign = ("WANDB_", "SLURM_", "MAKE", "MFLAGS")
    variables = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    return variables | {"WANDB_MODE": wandb, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


def flatten(name: str, value: Any) -> dict[str, float]:
    """Return a number of a result under its name; the entries of a list or mapping as name_0, name_1."""
    if isinstance(value, int | float):
        return {name: float(value)}
    numbers = list(value.values()) if isinstance(value, dict) else list(value)
    return {f"{name}_{position}": float(number) for position, number in enumerate(numbers)}


def timelines(*labels: str) -> Callable[[Path], dict[str, Any]]:
    """Return a function that reads the timeline of one step of the newest runs of these sides, for figures."""

    def read_timelines(scratch: Path) -> dict[str, Any]:
        timeline_of = {}
        for label in labels:
            file = scratch / f"{label}.timeline"
            if file.exists():
                timeline_of[label] = json.loads(file.read_text())
        return {"timelines": timeline_of}

    return read_timelines
