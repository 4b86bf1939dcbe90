"""A benchmark whose two processes take turns, from its command to its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment


@pytest.mark.drawn
def test_a_benchmark_ends_with_a_table_and_leaves_its_samples(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks", f"--folder={tmp_path}", "--minutes=0.4", "--rounds=1"]
    completed = execution.execute_command([*command, "--", "sparse_prune/linear"], env=make_environment(), status=0)
    assert "sparse_prune/linear  98 %" in completed.stdout
    (file,) = tmp_path.iterdir()
    part = json.loads(file.read_text())["parts"]["sparse_prune/linear"]
    assert part["rounds"] == len(part["samples"]["bf16"]["seconds"]) >= 1
    assert part["facts"] == ["2 threads"]
