"""The doctor: silent on sound hosts, and naming the one that is not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from common.checkup import problems
from tests.helpers import ROOT, environment

SOUND = {
    "host": "node1", "rank": 0, "address": "10.0.0.1", "versions": {"torch": "2.15.0", "numpy": "2.4"}, "device": "cpu",
    "cores": 4, "cores_asked": 4, "disk_free_gb": 50.0, "all_reduce_right": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({}, ""),
        ({"versions": {"torch": "2.11.0", "numpy": "2.4"}}, "node3 (rank 2) has torch 2.11.0, the others 2.15.0"),
        ({"address": ""}, "node3 (rank 2) does not know its own name"),
        ({"address": "127.0.1.1"}, "node3 (rank 2) resolves its own name to 127.0.1.1"),
        ({"device": "H200"}, "node3 (rank 2) has H200, the others cpu"),
        ({"cores": 1}, "node3 (rank 2) may use 1 cores, 4 were asked for"),
        ({"disk_free_gb": 0.1}, "node3 (rank 2) has 0.1 GB free"),
        ({"disk_free_gb": None}, "node3 (rank 2) has None GB free"),
        ({"all_reduce_right": False}, "node3 (rank 2) got a wrong sum"),
    ],
)
def test_the_host_with_the_fault_is_named(fault: dict[str, Any], message: str) -> None:
    facts = [SOUND | {"host": f"node{rank + 1}", "rank": rank} for rank in range(3)]
    facts[2] |= fault
    found = problems(facts, 3)
    assert len(found) == bool(message)
    assert not message or message in found[0]


def test_this_machine_is_sound() -> None:
    words = [sys.executable, "-m", "slurm.doctor", "--nodes=2"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all is sound"
    assert "all_reduce_gb_per_s" in done.stdout and len(done.stdout.splitlines()) == 5
