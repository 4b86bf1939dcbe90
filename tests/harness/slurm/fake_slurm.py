"""SLURM's commands as scripts with fixed outputs, and commands of the project that call them."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from slurm.__main__ import main as slurm_main
from slurm.scheduling import scheduler
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.processes import make_environment
from tests.harness.repository import ROOT


class FakeSlurm:
    """SLURM's commands as scripts on PATH. Each appends its command line to the file `calls`."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        self.bin.mkdir()
        self.conf = folder / "slurm.conf"
        self.conf.touch()
        self.answer(
            "scontrol", 'case "$1" in ping) echo "Slurmctld(primary) at ctl is UP";; *) echo "JobState=RUNNING";; esac'
        )
        self.answer("sbatch", 'cat "$1" >/dev/null; echo "Submitted batch job 4711"')
        self.answer("squeue", "echo '4711|RUNNING|None'")
        self.answer("sinfo", "echo 4")
        self.answer("sacct", "echo COMPLETED")
        self.answer("scancel", "exit 0")

    def answer(self, name: str, body: str) -> None:
        """Replace the script of a command."""
        script = self.bin / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.calls}"\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IEXEC)

    def environment(self, **extra: str) -> dict[str, str]:
        path = f"{self.bin}:{Path(sys.executable).parent}:/usr/bin:/bin"
        missing_cluster = str(self.bin.parent / "no-cluster")
        variables = {"PATH": path, "SLURM_CONF": str(self.conf), "CLUSTER_DIR": missing_cluster}
        return make_environment(**variables | extra)


def execute_module(
    fake: FakeSlurm, module: str, *arguments: str, source: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Execute a module of the sources in the folder `source`, by default of this checkout."""
    command = [sys.executable, "-m", module, *arguments]
    return execution.execute_command(
        command, cwd=source, env=fake.environment(PYTHONPATH=str(source), **env), timeout=60
    )


def call_main(
    fake: FakeSlurm, main: Callable[[list[str]], int], *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Call a command in this process without cached outputs of the scheduler. A fork would take 0.4 s more."""
    with mock.patch.multiple(scheduler, FAILURE_CACHE={}, QUEUE_CACHE={}):
        return in_process_calls.call_main(main, *arguments, cwd=ROOT, **fake.environment(**env))


def call_slurm(fake: FakeSlurm, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call `python -m slurm` in this process, with a verb that starts no other process."""
    return call_main(fake, slurm_main, *arguments)
