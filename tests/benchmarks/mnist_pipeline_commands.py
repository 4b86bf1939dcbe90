"""Parts d and e of the benchmark: runs started by their command, timed from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.runs.folder import Folder
from tests.benchmarks.learner import ROOT, UNSPLIT, Bench
from tests.benchmarks.measure import Load, Row, Samples, at_most

SCRIPT = "experiments/mnist_pipeline.py"
RECIPE = (*UNSPLIT, "batch=256", "epochs=4", "optim.name=adam", "optim.lr=0.004", "optim.decay=linear")

# ---- d: time to accuracy


def part_d(bench: Bench) -> None:
    if bench.prepared.name != "mnist":
        print("\nd  SKIPPED: real MNIST is not here; set DATA_ROOT to a folder with MNIST/raw")
        return
    taken, accuracies = Samples(), []
    for seed in range(5):
        before = Load.now()
        folder = finish(bench, f"d-{seed}", *RECIPE, f"seed={seed}", "wandb.mode=disabled")
        taken.add("training", training_seconds(folder), before)
        accuracies.append(folder.result["test_accuracy"])
    seconds = taken.seconds["training"]
    good = sum(s <= 2.0 and a >= 0.975 for s, a in zip(seconds, accuracies, strict=True))
    disturbed = ["" if seed in taken.clean() else "noisy" for seed in range(5)]
    rows = [
        Row(f"seed {seed}: {s:.2f} s of training", f"{a:.2%}", note=note)
        for seed, (s, a, note) in enumerate(zip(seconds, accuracies, disturbed, strict=True))
    ]
    rows.append(Row("seeds with 97.5 % after at most 2 s", f"{good} of 5", "5 of 5", good == 5))
    title = f"d  to 97.5 % on real MNIST, at the end of a run fixed beforehand: {' '.join(RECIPE)}"
    bench.report.section(title, rows, {"": taken}, accuracies=accuracies)


def training_seconds(folder: Folder) -> float:
    """From the start of the run to its last step, evaluations left out."""
    total = resumed = last = 0.0
    for row in folder.metrics():
        if "loss" in row:
            last = row["time"]
        else:
            total, resumed = total + last - resumed, row["time"]
    return total


# ---- e: from the command to the first step


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "SLURM_"))}
    return kept | {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


def finish(bench: Bench, name: str, *values: str) -> Folder:
    """The folder of a run that was started by its command and has ended."""
    runs = bench.scratch / name
    command = [sys.executable, SCRIPT, f"runs={runs}", *values]
    subprocess.run(command, cwd=ROOT, env=environment() | {"WANDB_MODE": "disabled"}, check=True, capture_output=True)
    (path,) = runs.iterdir()
    return Folder(path)


def first_row(bench: Bench, name: str, command: Callable[[str], list[str]]) -> float:
    """Seconds from starting a command to its first row on disk; then the command runs to its end."""
    runs = Path(tempfile.mkdtemp(prefix=name.replace(" ", "-"), dir=bench.scratch))
    words = command(f"runs={runs} steps=30 data.test_limit=1000")
    start = time.perf_counter()
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not any(file.stat().st_size for file in runs.glob("*/attempts/0001/metrics.jsonl")):
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended early: {process.communicate()[1].decode()}")
            time.sleep(0.003)
        return time.perf_counter() - start
    finally:
        process.communicate(timeout=120)


def commands() -> dict[str, Callable[[str], list[str]]]:
    """The ways to start a run, each as a function of the settings."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    found: dict[str, Callable[[str], list[str]]] = {
        "python": lambda settings: [sys.executable, SCRIPT, *settings.split()],
        "torchrun": lambda settings: [*torchrun, "--nproc-per-node=2", SCRIPT, *settings.split()],
    }
    made = ["make", "--question", ".venv/.ready"]
    if shutil.which("make") and subprocess.run(made, cwd=ROOT, capture_output=True, check=False).returncode == 0:
        make = ["make", "-s", "exp", "NAME=mnist_pipeline", "LAUNCH=local"]
        found["make exp"] = lambda settings: [*make, f"ARGS={settings}"]
    else:
        print("\ne  `make exp` SKIPPED: .venv is not set up here; `make lint` would do it")
    return found


def import_torch() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], cwd=ROOT, env=environment(), check=True)
    return time.perf_counter() - start


def part_e(bench: Bench) -> None:
    ways, taken = commands(), Samples()
    for number in range(7):
        for name in ("import torch", *ways):
            before = Load.now()
            seconds = first_row(bench, name, ways[name]) if name in ways else import_torch()
            if number:
                taken.add(name, seconds, before)
    rows = [Row(f"s: {name}", f"{taken.median(name):.2f}") for name in taken.seconds]
    rows.append(at_most("python / import torch", taken.ratio("python", "import torch"), 1.5))
    rows += [Row(f"{name} / import torch", str(taken.ratio(name, "import torch"))) for name in ways if name != "python"]
    bench.report.section("e  from the command to the first row on disk, two processes, W&B offline", rows, {"": taken})
