"""The verb `tour`: every experiment at its smallest, one after the other, and then all of them side by side."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from common.core import config
from slurm.reports import selection

FEW_STEPS = ("epochs=1", "steps=30", "data.test_limit=1000")
SMALLEST: dict[str, tuple[str, ...]] = {
    "mnist_pipeline": ("batch=16", "microbatches=2"),
    "ddp_multinode": ("batch=16", "optim.base_batch=16", "optim.warmup=0"),
    "amp_accum": ("batch=16", "optim.base_batch=16", "optim.warmup=0"),
    "param_server": ("batch=16", "optim.base_batch=16", "optim.warmup=0", "plot=false"),
    "local_sgd": ("every=2", "batch=16", "optim.base_batch=16", "optim.warmup=0"),
    "resnet_dataparallel": ("model=convnet", "batch=16", "optim.base_batch=16", "optim.warmup=0", "compare=false"),
    "resnet_modelparallel": ("width=8", "batch=16", "split_size=8", "plot=false"),
    "sparse_prune": ("batch=16", "optim.warmup=0", "every=5", "export=false", "int8=false"),
    "collectives": ("sizes=[4,1K]", "rounds=10", "plot=false"),
}
"""The smallest settings of each experiment; one that is not listed takes its defaults, for a few steps."""


def main(given: argparse.Namespace) -> int:
    """Run every experiment at its smallest and compare the runs; returns the exit status."""
    more = given.words
    root = Path(config.parse_command_line(more).values.get("runs", "runs"))
    before = {folder.path for folder in selection.list_runs(root)}
    began, failed = time.monotonic(), []
    for name in config.list_experiments():
        words = shlex.join([*FEW_STEPS, *SMALLEST.get(name, ()), *more])
        print(f"\n---- {name}: make exp NAME={name} ARGS={shlex.quote(words)}", flush=True)
        command = [sys.executable, "-m", "slurm", "exp", "--launch=local", f"--args={words}", "--", name]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"\n---- side by side, after {time.monotonic() - began:.0f} s", flush=True)
    made = [str(folder.path) for folder in selection.list_runs(root) if folder.path not in before]
    shown = 0
    if made:
        command = [sys.executable, "-m", "slurm", "compare", f"--runs-folder={root}", f"--runs={shlex.join(made)}"]
        shown = subprocess.run(command, check=False).returncode
    if failed:
        print(f"error: {', '.join(failed)} failed; their errors stand above", file=sys.stderr)
    return 1 if failed else shown
