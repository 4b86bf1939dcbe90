"""What tests of several pytest workers share: made once, by the first that needs it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder that `make` has filled, in this worker or in another, which is then waited for.

    A `make` that fails leaves the folder unfinished, and the next test that asks tries again in an empty one.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has a folder of its own below the common one
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        count = len(list(base.glob(f"{name}.try-*")))
        done = base / f"{name}.done"
        if not done.exists():
            (base / f"{name}.try-{count}").mkdir()
            make(base / f"{name}.try-{count}")
            done.write_text(str(base / f"{name}.try-{count}"))
        return Path(done.read_text())
