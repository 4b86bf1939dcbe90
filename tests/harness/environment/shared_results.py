"""Folders and runs that the tests of all pytest workers share. The first test that needs one creates it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.experiments.registry import Entry

GetRun = Callable[[Entry], FinishedRun]


def create_folder_once(factory: pytest.TempPathFactory, name: str, fill_folder: Callable[[Path], Any]) -> Path:
    """Return a folder that `make` has filled, in this worker or in another one.

    If `fill_folder` fails, the next test that needs the folder calls it again with an empty folder.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the folders of the workers have a common parent
    with hold_lock(base / f"{name}.lock"):
        tries = len(list(base.glob(f"{name}.try-*")))
        path_file = base / f"{name}.path"
        if not path_file.exists():
            folder = base / f"{name}.try-{tries}"
            folder.mkdir()
            fill_folder(folder)
            path_file.write_text(str(folder))
        return Path(path_file.read_text())


@contextlib.contextmanager
def hold_lock(file: Path) -> Iterator[None]:
    """Hold an exclusive lock in the `with` block."""
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def run_experiment_once(factory: pytest.TempPathFactory, key: str, name: str, *settings: str) -> FinishedRun:
    """Return a run that all tests with this key share. None of them may change its folder."""

    def train(folder: Path) -> None:
        finished = run_experiment(name, *settings, runs=folder / "my runs")
        record = dataclasses.asdict(finished) | {"runs": str(finished.runs), "command": [name, *settings]}
        (folder / "run.json").write_text(json.dumps(record))

    record = json.loads((create_folder_once(factory, key, train) / "run.json").read_text())
    assert record["command"] == [name, *settings], f"{key} is the key of another run"
    return FinishedRun(record["returncode"], record["stdout"], record["stderr"], Path(record["runs"]))
