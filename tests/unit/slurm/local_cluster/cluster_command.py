"""`python -m slurm cluster`, and the plan of a local cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slurm.local_cluster.slurm_conf import Plan
from tests.harness.commands import execution

PLAN = Plan("local", Path("/tmp/c"), 3, 2, 1000, "me", 1000, 100, "none", False, 5000, {})


def run_cluster_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a fork of the fork server, with additional environment variables."""
    command = [sys.executable, "-m", "slurm", "cluster", *arguments]
    return execution.execute_command(command, env=os.environ | variables, timeout=60)


def check_refused(process: subprocess.CompletedProcess[str], *phrases: str) -> None:
    """Check that a command ended with status 2 and one line of error output, which contains the phrases."""
    assert process.returncode == 2, process
    assert process.stderr.startswith("error: ")
    assert process.stderr.count("\n") == 1, process.stderr
    for phrase in phrases:
        assert phrase in process.stderr
