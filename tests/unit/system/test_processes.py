"""What identifies a process, also where /proc is that of another pid namespace."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.warm import ROOT

PROGRAM = """
import os
from pathlib import Path
from common.system.processes import Process
me = Process.identify(os.getpid())
print(me.start == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]), me.is_alive())
"""


@pytest.mark.parametrize(
    "namespace", [[], ["unshare", "--user", "--map-root-user", "--pid", "--fork"]], ids=["own", "other"]
)
def test_a_process_knows_itself(namespace: list[str]) -> None:
    words = [*namespace, sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    assert done.stdout.split() == ["True", "True"], done
