"""`make tour` runs every experiment, and its page shows all of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config import config
from slurm.launch import tour
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import make_environment


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that the tour starts are forks of the fork server."""

    def run(command: list[str], *, check: bool) -> Completed:
        completed = execution.execute_command(command, env=make_environment(), status=0 if check else None)
        print(completed.stdout)
        print(completed.stderr, file=sys.stderr)
        return completed

    monkeypatch.setattr(tour, "subprocess", SimpleNamespace(run=run))


def test_every_experiment_is_visited(tmp_path: Path, cache: Path) -> None:
    runs = tmp_path / "runs"
    completed = in_process_calls.call_verb(
        "tour", f"runs={runs}", f"data.cache={cache}", "steps=3", "data.test_limit=100"
    )
    names = {path.parent.name.rsplit("-", 3)[0] for path in runs.glob("*/config.yaml")}
    assert names == set(config.list_experiments())
    table = completed.stdout.partition("---- comparison")[2]
    for name in names:
        assert re.search(rf"^{name}:\n\S+ +finished", table, re.MULTILINE), name
    assert (runs / "compare.html").exists()


def test_a_failing_experiment_is_named_and_the_others_run(tmp_path: Path, cache: Path) -> None:
    arguments = (f"runs={tmp_path}/runs", f"data.cache={cache}", "steps=2", "data.test_limit=100", "depth=3")
    completed = in_process_calls.call_verb("tour", *arguments, status=1)
    assert "unknown key depth" in completed.stderr
    assert re.search("^error: .*ddp_multinode.* failed", completed.stderr, re.MULTILINE)
    assert "mnist_pipeline:" in completed.stdout.partition("---- comparison")[2]
