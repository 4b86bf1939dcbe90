"""make tour: every experiment runs, and the page shows them all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from common.core import config
from tests.harness import warm
from tests.harness.processes import environment


def tour(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.execute([sys.executable, "-m", "slurm", "tour", *words], env=environment(), timeout=280)


def test_every_experiment_is_visited(tmp_path: Path, cache: Path) -> None:
    runs = tmp_path / "runs"
    done = tour(f"runs={runs}", f"data.cache={cache}", "steps=3", "data.test_limit=100")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.parent.name.rsplit("-", 3)[0] for path in runs.glob("*/config.yaml")}
    assert found == set(config.list_experiments())
    table = done.stdout.rpartition("---- side by side")[2]
    assert all(re.search(rf"^{name}-\S+ +finished", table, re.MULTILINE) for name in found)
    assert (runs / "compare.html").exists()


def test_one_that_fails_is_named_and_the_others_run(tmp_path: Path, cache: Path) -> None:
    done = tour(f"runs={tmp_path}/runs", f"data.cache={cache}", "steps=2", "data.test_limit=100", "stages=2")
    assert done.returncode == 1
    assert "unknown key stages" in done.stderr
    assert re.search("^error: .*ddp_multinode.* failed", done.stderr, re.MULTILINE)
    assert "mnist_pipeline-" in done.stdout.rpartition("---- side by side")[2]
