"""The identity of a process, also if /proc shows another pid namespace."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.repository import ROOT

PROGRAM = """
import os
from pathlib import Path
from common.system.processes import Process
process = Process.identify(os.getpid())
fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
print(process.start == int(fields[19]), process.is_alive())
"""


@pytest.mark.parametrize(
    "namespace", [[], ["unshare", "--user", "--map-root-user", "--pid", "--fork"]], ids=["same", "another"]
)
def test_a_process_identifies_itself_in_any_pid_namespace(namespace: list[str]) -> None:
    command = [*namespace, sys.executable, "-c", PROGRAM]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.stderr.startswith("unshare:"):
        pytest.skip(f"cannot create a namespace: {process.stderr.strip()}")
    assert process.stdout.split() == ["True", "True"], process
