"""Check how a command ended that a test has executed."""

from __future__ import annotations

import subprocess

from common.system.exit_status import EXIT_REFUSED

Completed = subprocess.CompletedProcess[str]


def check_status(completed: Completed, expected: int | None) -> None:
    """Check the exit status, unless it is None. A refused command prints a single error and no traceback."""
    if expected is None:
        return
    output = completed.stdout + completed.stderr
    assert completed.returncode == expected, output
    if expected == EXIT_REFUSED:
        assert "Traceback" not in output, output
        errors = [line for line in completed.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, output
