"""The folder of a sweep, which records the run and the state of each point. This module does not import torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.runs import provenance
from common.runs.folder import RunFolder, convert_disk_errors, write_json
from common.system.errors import UserError
from common.system.exit_status import EXIT_REFUSED
from common.system.text import read_end_of_file
from slurm.launch import sweep_file
from slurm.launch.sweep_file import SweepPlan, SweepPoint
from slurm.reports import selection, status

REFUSED = "REFUSED"
"""State of a strategy that its run has refused, for example because a custom network does not have what it needs."""
DEVICE_KEY = "launch.device"
"""Setting that a sweep over strategies chooses on the machine that starts it."""


class SweepFolder:
    """Folder of a sweep, whose file sweep.json lists the run of each point."""

    def __init__(self, path: Path, plan: SweepPlan) -> None:
        self.path = path
        self.plan = plan
        self.runs = path.parent.parent
        self.shown_notices: set[str] = set()
        self.cells: dict[str, dict[str, Any]] = {}
        """Entry of each point in sweep.json (settings, run, and state), by the key of the point."""
        content = selection.read_sweep(path / "sweep.json")
        check_same_sweep(content, plan)
        for cell in content.get("cells", []):
            self.cells[sweep_file.make_point_key(cell["values"], cell.get("repeat", 0))] = cell

    @property
    def compare_command(self) -> str:
        """Command that compares the runs of the sweep. Only sweeps in ./runs can be named without a path."""
        is_default = self.runs.absolute() == Path("runs").absolute()
        return f"make compare SWEEP={shlex.quote(self.plan.name if is_default else str(self.path))}"

    def find_run_folder(self, point: SweepPoint) -> RunFolder | None:
        """Return the run folder of a point, or None if no run of the point has been started."""
        run = self.cells.get(point.key, {}).get("run")
        if not run or not (self.runs / run / "config.yaml").is_file():
            return None
        folder = RunFolder(self.runs / run)
        was_started = provenance.read_metadata(folder).get("job") or folder.list_attempts() or folder.result
        return folder if was_started else None

    def read_state(self, point: SweepPoint) -> str:
        folder = self.find_run_folder(point)
        if folder is None:
            return "MISSING"
        state = status.read_state(folder)[0]
        return REFUSED if state == "FAILED" and self.plan.compares_strategies and is_refused(folder) else state

    def read_reason(self, point: SweepPoint) -> str:
        """Return why the newest run of a point has failed, or an empty text."""
        folder = self.find_run_folder(point)
        result = folder.result if folder is not None else None
        return str((result or {}).get("reason", ""))

    def record_run(self, point: SweepPoint, folder: RunFolder, state: str) -> None:
        """Record the run of a point. If the point already had another run, list that run under `earlier`."""
        old_cell = self.cells.get(point.key, {})
        earlier = old_cell.get("earlier", [])
        if old_cell.get("run") not in (None, folder.path.name):
            earlier = [*earlier, old_cell["run"]]
        cell = {"values": point.values, "repeat": point.repeat, "run": folder.path.name, "state": state}
        if earlier:
            cell["earlier"] = earlier
        self.cells[point.key] = cell

    def record_start(self, point: SweepPoint, folder: RunFolder) -> None:
        """Record and save that the run of a point has been started."""
        self.record_run(point, folder, "running")
        self.save()

    def record_state(self, point: SweepPoint) -> str:
        """Record and return the current state of a point's run. Raises UserError if the folder cannot be written."""
        state = self.read_state(point)
        self.cells[point.key]["state"] = state.lower()
        self.save()
        return state

    def forget_run(self, point: SweepPoint) -> None:
        """Remove the entry of a run that could not be started, and restore the entry of the previous run."""
        cell = self.cells.pop(point.key)
        if cell.get("earlier"):
            *earlier, run = cell["earlier"]
            self.cells[point.key] = cell | {"run": run, "earlier": earlier}

    def remove_refused_run(self, point: SweepPoint, folder: RunFolder, status: int) -> str | None:
        """Delete the folder of a run if the run was refused before its first attempt.

        `status` is the exit status of the run. Returns the error that the run printed, or None if the run was not
        refused.
        """
        if status != EXIT_REFUSED or folder.result or folder.list_attempts():
            return None
        log = read_end_of_file(folder.path / "screen.log")
        shutil.rmtree(folder.path)
        self.forget_run(point)
        self.save()
        return log.rpartition("error: ")[2].strip() or "the run printed no error"

    def print_refused_run(self, point: SweepPoint, folder: RunFolder, status: int) -> None:
        """Print the error of a run that was refused before its first attempt, and delete its folder."""
        error = self.remove_refused_run(point, folder, status)
        if error is not None:
            print(f"             {error}", flush=True)

    def save(self) -> None:
        order = {point.key: number for number, point in enumerate(self.plan.points)}
        keys = sorted(self.cells, key=lambda key: order.get(key, len(order)))
        cells = [self.cells[key] for key in keys]
        plan = self.plan
        content = {"experiment": plan.experiment, "group": plan.name, "settings": plan.settings, "cells": cells}
        write_json(self.path / "sweep.json", content)

    def read_states(self) -> dict[str, str]:
        """Read and record the state of every point. Return the states by the key of the point."""
        states = {point.key: self.read_state(point) for point in self.plan.points}
        for key, state in states.items():
            if key in self.cells:
                self.cells[key]["state"] = state.lower()
        self.save()
        return states


def is_refused(folder: RunFolder) -> bool:
    """Return whether a run has ended before its first step, because of its settings."""
    result = folder.result or {}
    return (result.get("exit_status"), result.get("cause"), result.get("last_step")) == (EXIT_REFUSED, "other", 0)


def check_same_sweep(content: dict[str, Any], plan: SweepPlan) -> None:
    """Raise UserError if the sweep was started with a different experiment or different settings."""
    new_name = "or rename the sweep file to start a new sweep"
    experiment = content.get("experiment", plan.experiment)
    if experiment != plan.experiment:
        raise UserError(
            f"the sweep {plan.name} was started with experiment={experiment}; use that experiment, {new_name}"
        )
    settings = content.get("settings", plan.settings)
    changed = {key: value for key, value in settings.items() if plan.settings.get(key) != value}
    added = {key: value for key, value in plan.settings.items() if key not in settings}
    is_device_chosen = plan.compares_strategies and {*changed, *added} == {DEVICE_KEY}
    if is_device_chosen:  # a sweep whose ARGS contain the device has another name
        difference = f"with {format_settings(changed)}" if changed else f"without {format_settings(added)}"
        remedy = "repeat the command there, or set ARGS=seed=1 to start a new sweep here"
        raise UserError(f"the sweep {plan.name} was started on another machine, {difference}; {remedy}")
    if changed:
        text = format_settings(changed)
        remedy = f"use ARGS={shlex.quote(text)}"
        if added:
            remedy += f" without {format_settings(added)}"
        raise UserError(f"the sweep {plan.name} was started with {text}; {remedy}, {new_name}")
    if added:
        text = format_settings(added)
        raise UserError(f"the sweep {plan.name} was started without {text}; omit {text}, {new_name}")


def format_settings(settings: Mapping[str, str]) -> str:
    """Format settings as command-line arguments, quoted for a shell."""
    return shlex.join(f"{key}={value}" for key, value in settings.items())


@contextlib.contextmanager
def remove_if_nothing_started(sweep: SweepFolder) -> Iterator[None]:
    """Delete the folder of a sweep after the block if no run of the sweep exists."""
    try:
        yield
    finally:
        if not sweep.cells:
            shutil.rmtree(sweep.path)


@contextlib.contextmanager
def lock_sweep(path: Path) -> Iterator[None]:
    """Hold the lock of a sweep inside the block. Raises UserError if another command holds it."""
    with convert_disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(handle):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another make sweep is using {path}; wait until that command ends, or stop it") from None
        yield
