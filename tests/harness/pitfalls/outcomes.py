"""Execute the mistakes of this package in another process, and collect what happens.

python -m tests.harness.pitfalls.outcomes MODULE NAME ...      print the outcome of each named function as JSON
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.ranks.rendezvous import World
from configs.shared import Launch
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment, wait_until
from tests.harness.ranks.programs import run_on_ranks

TIMEOUT_SECONDS = 2.0
"""Time limit of a collective."""


def record_outcome(function: Callable[[], Any]) -> Any:
    """Call a function; return its result, or its error message and the seconds until the error."""
    start = time.monotonic()
    try:
        return function()
    except Exception as error:
        return {"error": str(error), "seconds": time.monotonic() - start}


def collect_from_ranks(size: int, function: Callable[[World], Any], seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Call a function on `size` ranks and return their outcomes; `seconds` is the time limit of a collective."""
    folder = Path(tempfile.mkdtemp())
    files = [folder / str(rank) for rank in range(size)]

    def save_outcome(world: World) -> None:
        dist.barrier()  # a rank that leaves at once would fail the others, which may still connect to it
        outcome = record_outcome(lambda: function(world))
        files[world.rank].write_text(json.dumps(outcome))
        if world.is_main:  # rank 0 has the store, which must exist until the other ranks have failed, too
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: all(file.exists() for file in files), "all outcomes", 3 * seconds, pause=0.01)

    assert run_on_ranks(save_outcome, size, Launch(device="cpu", threads=1, step_timeout=seconds)) == 0
    return [json.loads(file.read_text()) for file in files]


def collect_outcomes(module: str, *names: str, **variables: str) -> dict[str, Any]:
    """Call functions of a module of this package in one new process, and return the outcomes by name."""
    command = [sys.executable, "-m", "tests.harness.pitfalls.outcomes", module, *names]
    process = execution.execute_command(command, env=make_environment(**variables), timeout=250)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout.splitlines()[-1]))


def collect_outcome(module: str, name: str, **variables: str) -> Any:
    """Call a function of a module of this package in a new process, and return its outcome."""
    return collect_outcomes(module, name, **variables)[name]


if __name__ == "__main__":
    module = importlib.import_module(f"tests.harness.pitfalls.{sys.argv[1]}")
    print(json.dumps({name: getattr(module, name)() for name in sys.argv[2:]}))
