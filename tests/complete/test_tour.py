"""make tour: every experiment runs, and the page shows them all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config import config
from slurm.launch import tour
from tests.harness import inside, warm
from tests.harness.processes import environment


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that the tour starts are forks of the warm process."""

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        done = warm.execute(command, env=environment(), check=check)
        print(done.stdout)
        print(done.stderr, file=sys.stderr)
        return done

    monkeypatch.setattr(tour, "subprocess", SimpleNamespace(run=run))


def test_every_experiment_is_visited(tmp_path: Path, cache: Path) -> None:
    runs = tmp_path / "runs"
    done = inside.run_verb("tour", f"runs={runs}", f"data.cache={cache}", "steps=3", "data.test_limit=100")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.parent.name.rsplit("-", 3)[0] for path in runs.glob("*/config.yaml")}
    assert found == set(config.list_experiments())
    table = done.stdout.partition("---- comparison")[2]
    assert all(re.search(rf"^{name}:\n\S+ +finished", table, re.MULTILINE) for name in found)
    assert (runs / "compare.html").exists()


def test_one_that_fails_is_named_and_the_others_run(tmp_path: Path, cache: Path) -> None:
    words = (f"runs={tmp_path}/runs", f"data.cache={cache}", "steps=2", "data.test_limit=100", "depth=3")
    done = inside.run_verb("tour", *words)
    assert done.returncode == 1
    assert "unknown key depth" in done.stderr
    assert re.search("^error: .*ddp_multinode.* failed", done.stderr, re.MULTILINE)
    assert "mnist_pipeline:" in done.stdout.partition("---- comparison")[2]
