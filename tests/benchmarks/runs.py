"""Many run folders as real runs leave them, and the cost of reading them.

Every seventh run was started twice, and every eleventh failed half-way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.runs.synthetic_runs import SyntheticRun


def write_runs(runs: Path, count: int, steps: int) -> None:
    """Write runs of both experiments, of one to four processes, some of them restarted or broken."""
    for number in range(count):
        processes = 2 ** (number % 3)
        rate = 0.02 / (1 + number % 4)
        settings = {"optim.lr": f"{rate:.4f}"}
        if number % 2 == 0:
            name = "mnist_pipeline"
            settings |= {"stages": str(processes), "depth": "6"}
            measured: dict[str, object] = {"idle_share": [0.2] * processes}
        else:
            name = "ddp_multinode"
            settings |= {"processes_per_node": str(processes)}
            measured = {"efficiency": 1 - 0.05 * processes}
        run = SyntheticRun(
            name=name,
            number=number,
            steps=steps,
            attempts=2 if number % 7 == 3 else 1,
            state="failed" if number % 11 == 5 else "finished",
            settings=settings,
            step_seconds=0.01 / (0.2 + 0.8 * processes),
            result={"measured": measured},
        )
        run.write(runs)


def measure_reading(runs: Path, command: Sequence[str]) -> dict[str, float]:
    """Return the seconds and the seconds of one core that a command takes for the runs in `runs`."""
    start = time.perf_counter()
    arguments = [sys.executable, "-m", *command[:2], f"--runs-folder={runs}", *command[2:]]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status  # it has been waited for
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime}
