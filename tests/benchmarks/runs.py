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

from tests.harness.made_runs import Made


def several(runs: Path, count: int, steps: int) -> None:
    """Runs of both experiments, of one to four processes, some of them restarted or broken."""
    for number in range(count):
        processes, rate = 2 ** (number % 3), 0.02 / (1 + number % 4)
        pipeline = number % 2 == 0
        measured = {"idle_share": [0.2] * processes} if pipeline else {"efficiency": 1 - 0.05 * processes}
        Made(
            name="mnist_pipeline" if pipeline else "ddp_multinode",
            number=number,
            steps=steps,
            attempts=2 if number % 7 == 3 else 1,
            state="failed" if number % 11 == 5 else "finished",
            settings={"optim.lr": f"{rate:.4f}", "stages" if pipeline else "processes_per_node": str(processes)}
            | ({"depth": "6"} if pipeline else {}),
            step_seconds=0.01 / (0.2 + 0.8 * processes),
            result={"measured": measured},
        ).write(runs)


def measure_reading(runs: Path, command: Sequence[str]) -> dict[str, float]:
    """Seconds and seconds of one core that a command takes for the runs in `runs`."""
    began = time.perf_counter()
    done = subprocess.Popen(
        [sys.executable, "-m", *command[:2], f"--runs-folder={runs}", *command[2:]], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(done.pid, 0)
    done.returncode = status  # it has been waited for
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime}
