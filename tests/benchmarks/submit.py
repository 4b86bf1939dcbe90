"""From `make exp` to the first training step on an idle local cluster, in parts, beside a bare sbatch.

    python tests/benchmarks/submit.py [ROUNDS]

Starts a cluster of its own with two hosts. Both sides run mnist_pipeline in two processes on two hosts, in turns; the
first round is dropped. Prints medians and saves every sample as JSON in tests/benchmarks/results/.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.data.prepare import prepare_digits  # noqa: E402
from common.runs import provenance  # noqa: E402

GOAL = 1.3
PARTS = ("submit", "schedule", "interpreter and imports", "rendezvous", "data, model, first step")


def call(env: dict[str, str], *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def first_row(runs: Path, began: float) -> tuple[Path, float]:
    """The run folder, and the seconds until its first row of metrics was on disk."""
    while time.time() - began < 120:
        for path in runs.glob("*/attempts/0001/metrics.jsonl"):
            if path.stat().st_size:
                return path.parents[2], time.time() - began
        time.sleep(0.002)
    raise TimeoutError(f"no training step in {runs}")


def ours(env: dict[str, str], scratch: Path, settings: list[str]) -> dict[str, float]:
    """One submission through `make exp`'s entry, in its parts."""
    runs, stamp = scratch / "runs", scratch / "started"
    words = " ".join([*settings, f"runs={runs}", f"'cluster.setup=[date +%s.%N >{stamp}]'"])
    began = time.time()
    call(env, "slurm.launch.submit", "--nodes=2", f"--args={words}", "--", "mnist_pipeline")
    folder, total = first_row(runs, began)
    submitted = (folder / "submit" / "job.sh").stat().st_mtime - began  # written just before sbatch is called
    started = float(stamp.read_text()) - began
    world = json.loads((folder / "attempts/0001/world.json").read_text())
    claimed = (folder / "attempts/0001/logs").stat().st_ctime - began
    meet = world["rendezvous_seconds"]
    parts = (submitted, started - submitted, claimed - meet - started, meet, total - claimed)
    call(env, "slurm.reports.status", "status", str(folder), "--wait=60")
    return dict(zip(PARTS, parts, strict=True)) | {"total": total}


def bare(env: dict[str, str], scratch: Path, settings: list[str]) -> dict[str, float]:
    """The same script given to sbatch by hand."""
    runs = scratch / "runs"
    script = " ".join([sys.executable, "experiments/mnist_pipeline.py", *settings, f"runs={runs}"])
    wrap = f"srun --kill-on-bad-exit=1 --cpus-per-task=1 {script}"
    options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--output=/dev/null", f"--wrap={wrap}"]
    began = time.time()
    call(env, "slurm.local_cluster.cli", "exec", "sbatch", *options)
    folder, total = first_row(runs, began)
    call(env, "slurm.reports.status", "status", str(folder), "--wait=60")
    return {"total": total}


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        env = os.environ | {"CLUSTER_DIR": name, "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
        prepare_digits(place / "cache")
        settings = ["data.name=digits", f"data.cache={place}/cache", "steps=20", "data.test_limit=100"]
        call(env, "slurm.local_cluster.cli", "up", "--nodes", "2")
        samples: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
        try:
            for number in range(rounds + 1):
                for side, measure in (("ours", ours), ("bare", bare)):
                    scratch = place / f"{side}-{number}"
                    scratch.mkdir()
                    samples[side].append(measure(env, scratch, settings))
        finally:
            call(env, "slurm.local_cluster.cli", "down")
    kept = {side: rows[1:] for side, rows in samples.items()}
    for part in (*PARTS, "total"):
        print(f"{part:<26} {statistics.median(row[part] for row in kept['ours']):6.2f} s")
    print(f"{'bare sbatch, total':<26} {statistics.median(row['total'] for row in kept['bare']):6.2f} s")
    ratios = [a["total"] / b["total"] for a, b in zip(kept["ours"], kept["bare"], strict=True)]
    print(f"ours / bare: {statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}], goal at most {GOAL}")
    save(samples)


def save(samples: dict[str, list[dict[str, float]]]) -> None:
    folder = ROOT / "tests" / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    versions = {name: provenance.version(name) for name in provenance.PACKAGES} | {"python": platform.python_version()}
    machine = {"cpu": provenance.cpu_model(), "cores": len(os.sched_getaffinity(0))}
    found = {"date": date, "machine": machine, "versions": versions, "samples": samples}
    (folder / f"submit-{date}.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
