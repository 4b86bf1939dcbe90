"""Runs that go on while a test looks at them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from common.folder import Folder
from tests.harness import warm
from tests.harness.processes import command, environment


@contextlib.contextmanager
def running(name: str, *words: str, runs: Path, **env: str) -> Iterator[tuple[warm.Command, Folder]]:
    """A run that has begun to train."""
    process = warm.Command(command(name, *words, runs=runs), env=environment(**env))
    try:
        deadline = time.monotonic() + 120
        while not list(runs.glob("*/attempts/0001/metrics.jsonl")):
            assert time.monotonic() < deadline and process.poll() is None, process.out + process.err
            time.sleep(0.05)
        yield process, Folder(next(runs.iterdir()), 1)
    finally:
        process.kill()  # its processes end with it
        process.wait(60)


def ranks_of(parent: int) -> list[int]:
    """The processes of a local run, in the order in which they were started."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sorted(int(pid) for pid in found if "common.tracking" not in Path(f"/proc/{pid}/cmdline").read_text())
