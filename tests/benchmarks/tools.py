"""What commands cost: from the command to the first step, here and on a cluster, and reading many runs."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.config.config import ROOT
from common.data.prepare import prepare_digits
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, environment
from tests.benchmarks.records import Row, Table, at_most
from tests.benchmarks.runs import measure_reading, several

SCRIPT = "experiments/mnist_pipeline.py"
FIRST_ROW = 300.0  # seconds until a start counts as failed


# ---- from the command to the first step


def first_row(runs: Path, words: list[str], env: dict[str, str]) -> float:
    """Seconds from starting a command to its first row of metrics on disk; then the command runs to its end."""
    start = time.perf_counter()
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not any(file.stat().st_size for file in runs.glob("*/attempts/0001/metrics.jsonl")):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(words)} ended early: {process.communicate()[1].decode()}")
            time.sleep(0.003)
        return time.perf_counter() - start
    finally:
        process.communicate(timeout=FIRST_ROW)


def commands() -> dict[str, Callable[[list[str]], list[str]]]:
    """The ways to start a run, each as a function of the settings."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    found: dict[str, Callable[[list[str]], list[str]]] = {
        "python": lambda settings: [sys.executable, SCRIPT, *settings],
        "torchrun": lambda settings: [*torchrun, "--nproc-per-node=2", SCRIPT, *settings],
    }
    ready = ["make", "--question", ".venv/.ready"]
    if shutil.which("make") and subprocess.run(ready, cwd=ROOT, capture_output=True, check=False).returncode == 0:
        make = ["make", "-s", "exp", "NAME=mnist_pipeline", "LAUNCH=local"]
        found["make exp"] = lambda settings: [*make, f"ARGS={' '.join(settings)}"]
    return found


def start_sides(scratch: Path) -> list[Task]:
    def import_torch(number: int) -> dict[str, float]:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], cwd=ROOT, env=environment(), check=True)
        return {"seconds": time.perf_counter() - start}

    def task(name: str, command: Callable[[list[str]], list[str]]) -> Task:
        def run(number: int) -> dict[str, float]:
            runs = Path(tempfile.mkdtemp(dir=scratch))
            words = command([f"runs={runs}", "steps=30", "data.test_limit=1000"])
            return {"seconds": first_row(runs, words, environment("offline"))}

        return Task(name, run)

    return [Task("import torch", import_torch), *(task(name, command) for name, command in commands().items())]


def start_table(taken: Samples) -> Table:
    rows = [Row(f"s: {side}", [taken.number(side)]) for side in taken.values]
    rows.append(at_most("python / import torch", taken.ratio("python", "import torch"), 1.5))
    others = [side for side in ("torchrun", "make exp") if side in taken.values]
    return Table(
        ("measured", "value"),
        [*rows, *(Row(f"{side} / import torch", [taken.ratio(side, "import torch")]) for side in others)],
    )


# ---- the same on a cluster

STEPS = ("submit", "schedule", "interpreter and imports", "rendezvous", "data, model, first step")


def call(env: dict[str, str], *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def wait_for_first_row(runs: Path, began: float) -> tuple[Path, float]:
    """The run folder, and the seconds until its first row of metrics was on disk. Raises TimeoutError."""
    while time.time() - began < FIRST_ROW:
        for path in runs.glob("*/attempts/0001/metrics.jsonl"):
            if path.stat().st_size:
                return path.parents[2], time.time() - began
        time.sleep(0.002)
    raise TimeoutError(f"no training step in {runs}")


def cluster_sides(scratch: Path) -> list[Task]:
    env = os.environ | {"CLUSTER_DIR": str(scratch), "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    prepare_digits(scratch / "cache")
    settings = ["data.name=digits", f"data.cache={scratch}/cache", "steps=20", "data.test_limit=100"]
    call(env, "slurm", "cluster", "up", "--nodes", "2")
    atexit.register(call, env, "slurm", "cluster", "down")

    def ours(number: int) -> dict[str, float]:
        """One submission through `make exp`'s entry, in its parts."""
        place = Path(tempfile.mkdtemp(dir=scratch))
        runs, stamp = place / "runs", place / "started"
        words = " ".join([*settings, f"runs={runs}", f"'cluster.setup=[date +%s.%N >{stamp}]'"])
        began = time.time()
        call(env, "slurm", "exp", "--nodes=2", f"--args={words}", "--", "mnist_pipeline")
        folder, total = wait_for_first_row(runs, began)
        submitted = (folder / "submit" / "job.sh").stat().st_mtime - began  # written just before sbatch is called
        started = float(stamp.read_text()) - began
        world = json.loads((folder / "attempts/0001/world.json").read_text())
        claimed = (folder / "attempts/0001/logs").stat().st_ctime - began
        meet = world["rendezvous_seconds"]
        parts = (submitted, started - submitted, claimed - meet - started, meet, total - claimed)
        call(env, "slurm", "status", str(folder), "--wait=60")
        return {"seconds": total} | dict(zip(STEPS, parts, strict=True))

    def bare(number: int) -> dict[str, float]:
        """The same script given to sbatch by hand."""
        runs = Path(tempfile.mkdtemp(dir=scratch)) / "runs"
        script = " ".join([sys.executable, SCRIPT, *settings, f"runs={runs}"])
        wrap = f"srun --kill-on-bad-exit=1 --cpus-per-task=1 {script}"
        options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--output=/dev/null", f"--wrap={wrap}"]
        began = time.time()
        call(env, "slurm", "cluster", "exec", "sbatch", *options)
        folder, total = wait_for_first_row(runs, began)
        call(env, "slurm", "status", str(folder), "--wait=60")
        return {"seconds": total}

    return [Task("make exp", ours), Task("bare sbatch", bare)]


def cluster_table(taken: Samples) -> Table:
    rows = [Row(f"s: {side}", [taken.number(side)]) for side in taken.values]
    rows += [Row(f"s: make exp: {step}", [taken.number("make exp", step)]) for step in STEPS]
    return Table(
        ("measured", "value"), [*rows, at_most("make exp / bare sbatch", taken.ratio("make exp", "bare sbatch"), 1.3)]
    )


def no_slurm() -> str:
    missing = [
        name
        for name in ("slurmctld", "slurmd", "sbatch")
        if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    ]
    return f"{missing[0]} is missing: apt-get install slurm-wlm" if missing else ""


# ---- reading many runs

COUNT, ROWS = 500, 2000


def reading_sides(scratch: Path) -> list[Task]:
    several(scratch / "runs", COUNT, ROWS)
    words = {
        "make compare LAST=50": ["slurm", "compare", "--last=50"],
        "make status": ["slurm", "status"],
    }

    def task(name: str, command: list[str]) -> Task:
        return Task(name, lambda number: measure_reading(scratch / "runs", command))

    return [task(name, command) for name, command in words.items()]


def reading_table(taken: Samples) -> Table:
    rows = [Row(side, [taken.number(side), taken.number(side, "cpu")]) for side in taken.values]
    return Table(("command", "s", "s of one core"), rows)


PARTS = [
    Part(
        "tools/start",
        "from the command to the first row of metrics: mnist_pipeline in two processes",
        start_sides,
        start_table,
        rounds=6,
        drop=1,
    ),
    Part(
        "tools/cluster",
        "from the command to the first row of metrics on an idle local SLURM cluster with two hosts",
        cluster_sides,
        cluster_table,
        drop=1,
        missing=no_slurm,
    ),
    Part(
        "tools/reading",
        f"reading {COUNT} runs of {ROWS} steps",
        reading_sides,
        reading_table,
        rounds=3,
    ),
]
