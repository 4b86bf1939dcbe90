"""`python -m slurm cluster`, and the plan of a local cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slurm.local_cluster.slurm_conf import Plan
from tests.harness.commands import execution
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import WAIT_TIMEOUT

PLAN = Plan("local", Path("/tmp/c"), 3, 2, 1000, "me", 1000, 100, "none", False, 5000, {})


def run_cluster_command(*arguments: str, status: int = 0, **variables: str) -> Completed:
    """Run the command as a fork of the fork server, with additional environment variables."""
    command = [sys.executable, "-m", "slurm", "cluster", *arguments]
    return execution.execute_command(command, env=os.environ | variables, timeout=WAIT_TIMEOUT, status=status)
