"""What tests of several pytest workers share: made once, by the first that needs it."""

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

from tests.harness.processes import Done, run
from tests.harness.registry import Entry

Make = Callable[[Entry], Done]


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder that `make` has filled, in this worker or in another, which is then waited for.

    A `make` that fails leaves the folder unfinished, and the next test that asks tries again in an empty one.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has a folder of its own below the common one
    with locked(base / f"{name}.lock"):
        count = len(list(base.glob(f"{name}.try-*")))
        done = base / f"{name}.done"
        if not done.exists():
            (base / f"{name}.try-{count}").mkdir()
            make(base / f"{name}.try-{count}")
            done.write_text(str(base / f"{name}.try-{count}"))
        return Path(done.read_text())


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep other processes out meanwhile."""
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def run_once(factory: pytest.TempPathFactory, key: str, name: str, *settings: str) -> Done:
    """A run of an experiment that several tests look at; none of them may write into its folder."""

    def make(folder: Path) -> None:
        done = run(name, *settings, runs=folder / "my runs")
        told = dataclasses.asdict(done) | {"runs": str(done.runs), "command": [name, *settings]}
        (folder / "done.json").write_text(json.dumps(told))

    told = json.loads((make_once(factory, key, make) / "done.json").read_text())
    assert told.pop("command") == [name, *settings], f"{key} is another run"
    return Done(**told | {"runs": Path(told["runs"])})
