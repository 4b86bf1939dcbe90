"""Many run folders as real runs leave them, and the cost of reading them.

Every seventh run was started twice, and every eleventh failed half-way.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.config.config import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun

DIFFERENT_RUNS = 22  # number of different runs that `copy_runs` copies
# A separate process, because the peak memory of a child includes that of its parent at the time of the fork.
MEASURE_COMMAND = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
seconds = time.perf_counter() - start
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "bytes": 1024 * usage.ru_maxrss}))
"""


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


def copy_runs(runs: Path, count: int) -> None:
    """Write many runs of 100 steps quickly, as copies of the runs of `write_runs`."""
    templates_folder = runs / "templates"
    write_runs(templates_folder, DIFFERENT_RUNS, 100)
    templates = sorted(templates_folder.iterdir(), key=lambda path: path.name.rpartition("-")[2])
    for number in range(count):
        template = templates[number % DIFFERENT_RUNS]
        experiment = template.name.rsplit("-", 3)[0]
        shutil.copytree(template, runs / f"{experiment}-20260101-{number:06d}-{number:04x}")
    shutil.rmtree(templates_folder)


def write_long_runs(runs: Path, count: int, rows: int) -> None:
    """Write runs that each have a training row for `rows` steps, and ten evaluations."""
    for number in range(count):
        attempt = SyntheticRun(number=number, steps=10).write(runs).list_attempts()[-1]
        with open(attempt.metrics_file, "w") as file:
            for step in range(1, rows + 1):
                position = f'"global_step": {step}, "samples": {64 * step}, "time": {0.01 * step:.6f}'
                file.write(f'{{{position}, "loss": {1 + number / step:.16f}, "learning_rate": {1 / step:.16f}}}\n')
                if step % max(1, rows // 10) == 0:
                    file.write(f'{{{position}, "test_loss": {1 / step:.16f}, "test_accuracy": 0.5}}\n')


def measure_reading(runs: Path, command: Sequence[str]) -> dict[str, float]:
    """Return the seconds, the seconds of one core and the peak memory of a command that reads the runs in `runs`."""
    arguments = [sys.executable, "-m", *command[:2], f"--runs-folder={runs}", *command[2:]]
    process = subprocess.run(
        [sys.executable, "-c", MEASURE_COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {process.stderr[-2000:]}")
    return dict(json.loads(process.stdout))
