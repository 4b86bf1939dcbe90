"""The time from a command to the first step, on this machine and on a cluster."""

from __future__ import annotations

import atexit
import contextlib
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
from tests.benchmarks import hosts
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, environment
from tests.benchmarks.records import Row, Table, at_most, make_value_table

SCRIPT = "experiments/mnist_pipeline.py"
FIRST_ROW_TIMEOUT = 300.0  # seconds until a start counts as failed
Command = Callable[[list[str]], list[str]]  # from the settings of a run to the command that starts it


# ---- from the command to the first step


def measure_first_row(runs: Path, command: list[str], env: dict[str, str]) -> float:
    """Return the seconds from a command to its first row of metrics on disk, then wait until the command ends."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not any(file.stat().st_size for file in runs.glob("*/attempts/0001/metrics.jsonl")):
            if process.poll() is not None:
                errors = process.communicate()[1].decode()
                raise RuntimeError(f"{' '.join(command)} ended before its first step: {errors}")
            time.sleep(0.003)
        return time.perf_counter() - start
    finally:
        process.communicate(timeout=FIRST_ROW_TIMEOUT)


def is_installed() -> bool:
    """Return whether `make exp` could start without installing anything first."""
    if not shutil.which("make"):
        return False
    question = subprocess.run(["make", "--question", ".venv/.ready"], cwd=ROOT, capture_output=True, check=False)
    return question.returncode == 0


def commands() -> dict[str, Command]:
    """Return the ways to start a run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    make = ["make", "-s", "exp", "NAME=mnist_pipeline", "LAUNCH=local"]
    by_name: dict[str, Command] = {
        "python": lambda settings: [sys.executable, SCRIPT, *settings],
        "torchrun": lambda settings: [*torchrun, "--nproc-per-node=2", SCRIPT, *settings],
    }
    if is_installed():
        by_name["make exp"] = lambda settings: [*make, f"ARGS={' '.join(settings)}"]
    return by_name


def import_torch(number: int) -> dict[str, float]:
    """Measure the time until a new process has imported torch. The exit of the process does not count."""
    command = [sys.executable, "-c", "import torch; print('imported', flush=True)"]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if not line or process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed")
    return {"seconds": seconds}


def make_start_task(scratch: Path, name: str, command: Command) -> Task:
    """A start of a run by one of the commands."""

    def run(number: int) -> dict[str, float]:
        runs = Path(tempfile.mkdtemp(dir=scratch))
        arguments = command([f"runs={runs}", "steps=30", "data.test_limit=1000"])
        return {"seconds": measure_first_row(runs, arguments, environment())}

    return Task(name, run)


def start_sides(scratch: Path) -> list[Task]:
    starts = [make_start_task(scratch, name, command) for name, command in commands().items()]
    return [Task("import torch", import_torch), *starts]


def start_table(samples: Samples) -> Table:
    rows = [Row(f"s: {side}", [samples.number(side)]) for side in samples.values]
    rows.append(at_most("python / import torch", samples.ratio("python", "import torch"), 1.05))
    rows.append(Row("torchrun / import torch", [samples.ratio("torchrun", "import torch")]))
    if "make exp" in samples.values:
        rows.append(at_most("make exp / import torch", samples.ratio("make exp", "import torch"), 1.15))
    return make_value_table(rows)


# ---- the same on a cluster

STEPS = ("submit", "schedule", "interpreter and imports", "rendezvous", "data, model, first step")


def call(env: dict[str, str], *arguments: str) -> str:
    """Run a module of this project with these arguments and return its output."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def wait_for_first_row(runs: Path, start: float) -> tuple[Path, float]:
    """Return the run folder, and the seconds until its first row of metrics was on disk. Raises TimeoutError."""
    while time.time() - start < FIRST_ROW_TIMEOUT:
        for path in runs.glob("*/attempts/0001/metrics.jsonl"):
            if path.stat().st_size:
                return path.parents[2], time.time() - start
        time.sleep(0.002)
    raise TimeoutError(f"no training step in {runs}")


def measure_submission(scratch: Path, env: dict[str, str], settings: list[str]) -> dict[str, float]:
    """Measure one submission through `make exp`'s entry, and its steps."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    runs = folder / "runs"
    stamp = folder / "started"
    arguments = " ".join([*settings, f"runs={runs}", f"'cluster.setup=[date +%s.%N >{stamp}]'"])
    start = time.time()
    call(env, "slurm", "exp", "--nodes=2", f"--args={arguments}", "--", "mnist_pipeline")
    run_folder, total = wait_for_first_row(runs, start)

    submitted = (run_folder / "submit" / "job.sh").stat().st_mtime - start  # written just before sbatch is called
    started = float(stamp.read_text()) - start
    world = json.loads((run_folder / "attempts/0001/world.json").read_text())
    claimed = (run_folder / "attempts/0001/logs").stat().st_ctime - start
    rendezvous = world["rendezvous_seconds"]
    seconds = (submitted, started - submitted, claimed - rendezvous - started, rendezvous, total - claimed)
    call(env, "slurm", "status", str(run_folder), "--wait=60")
    return {"seconds": total} | dict(zip(STEPS, seconds, strict=True))


def measure_bare_sbatch(scratch: Path, env: dict[str, str], settings: list[str]) -> dict[str, float]:
    """Measure the same script passed to sbatch by hand."""
    runs = Path(tempfile.mkdtemp(dir=scratch)) / "runs"
    script = " ".join([sys.executable, SCRIPT, *settings, f"runs={runs}"])
    wrap = f"srun --kill-on-bad-exit=1 --cpus-per-task=1 {script}"
    options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--output=/dev/null", f"--wrap={wrap}"]
    start = time.time()
    call(env, "slurm", "cluster", "exec", "sbatch", *options)
    run_folder, total = wait_for_first_row(runs, start)
    call(env, "slurm", "status", str(run_folder), "--wait=60")
    return {"seconds": total}


def cluster_sides(scratch: Path) -> list[Task]:
    prepare_digits(scratch / "cache")
    settings = ["data.name=digits", f"data.cache={scratch}/cache", "steps=20", "data.test_limit=100"]
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    cluster = stack.enter_context(hosts.local_cluster(scratch, 2))

    def make_task(name: str, measure: Callable[[Path, dict[str, str], list[str]], dict[str, float]]) -> Task:
        def run(number: int) -> dict[str, float]:
            before = cluster.measure_load()
            measured = measure(scratch, dict(cluster.env), settings)
            return measured | {"others": cluster.measure_load().compute_other_share(before)}

        return Task(name, run)

    return [make_task("make exp", measure_submission), make_task("bare sbatch", measure_bare_sbatch)]


def cluster_table(samples: Samples) -> Table:
    rows = [Row(f"s: {side}", [samples.number(side)]) for side in samples.values]
    rows += [Row(f"s: make exp: {step}", [samples.number("make exp", step)]) for step in STEPS]
    rows.append(at_most("make exp / bare sbatch", samples.ratio("make exp", "bare sbatch"), 1.3))
    return make_value_table(rows)


def no_slurm() -> str:
    """Return which program of SLURM is missing; empty if none is."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    for name in ("slurmctld", "slurmd", "sbatch"):
        if not shutil.which(name, path=path):
            return f"{name} is missing: apt-get install slurm-wlm"
    return ""


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
]
