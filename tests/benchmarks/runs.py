"""Many run folders as real runs leave them: python -m tests.benchmarks.runs FOLDER [COUNT] [STEPS]

Every seventh run was started twice, and every eleventh failed half-way.
With `--measure` the commands that read runs are timed on them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.harness.made_runs import Made


def several(runs: Path, count: int, steps: int) -> None:
    """Runs of both experiments, of one to four processes, some of them restarted or broken."""
    for number in range(count):
        processes, rate = 2 ** (number % 3), 0.02 / (1 + number % 4)
        pipeline = number % 2 == 0
        Made(
            name="mnist_pipeline" if pipeline else "ddp_multinode",
            number=number,
            steps=steps,
            attempts=2 if number % 7 == 3 else 1,
            state="failed" if number % 11 == 5 else "finished",
            settings={"optim.lr": f"{rate:.4f}", "stages" if pipeline else "processes_per_node": str(processes)}
            | ({"depth": "6"} if pipeline else {}),
            step_seconds=0.01 / (0.2 + 0.8 * processes),
            result={"idle_share": [0.2] * processes} if pipeline else {"efficiency": 1 - 0.05 * processes},
        ).write(runs)


def measure(runs: Path) -> dict[str, dict[str, float]]:
    """What the commands take over what lies in `runs`; on a busy machine only the seconds of the processor tell."""
    found = {}
    for name, words in (
        ("compare LAST=50", ["slurm.reports.compare", "--last=50"]),
        ("status", ["slurm.reports.status", "--", "status"]),
    ):
        module, *rest = words
        began = time.perf_counter()
        done = subprocess.Popen([sys.executable, "-m", module, f"--runs={runs}", *rest], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(done.pid, 0)
        assert status == 0, name
        seconds = time.perf_counter() - began
        found[name] = {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak_gb": used.ru_maxrss / 1e6}
    return found


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--measure"]
    place = Path(words[0])
    if not place.exists():
        several(place, int(words[1]) if words[1:] else 500, int(words[2]) if words[2:] else 10_000)
    if "--measure" in sys.argv:
        print(json.dumps(measure(place)))
