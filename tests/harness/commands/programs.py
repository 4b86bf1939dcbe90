"""Execute short Python programs in new processes that import this project."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tests.harness.repository import ROOT


def run_program(program: str) -> str:
    """Execute Python code in a new process, and return its output."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def list_loaded_modules(imports: str, modules: Sequence[str]) -> list[str]:
    """Return those of some modules that a new process has loaded after some imports."""
    return run_program(f"import sys, {imports}\nprint(*[name for name in {modules} if name in sys.modules])").split()
