"""SLURM's commands as scripts with fixed outputs, and commands of the project that call them."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from slurm.__main__ import main as slurm_main
from slurm.scheduling import scheduler
from tests.harness.commands import in_process, warm
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import environment
from tests.harness.commands.warm import ROOT


class Fake:
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
        return environment(**variables | extra)


def call(
    fake: Fake, module: str, *arguments: str, source: Path = ROOT, status: int | None = 0, **env: str
) -> Completed:
    """Execute a module of the sources in the folder `source`, by default of this checkout.

    Its exit status is checked, unless `status` is None.
    """
    command = [sys.executable, "-m", module, *arguments]
    variables = fake.environment(PYTHONPATH=str(source), **env)
    return warm.execute(command, cwd=source, env=variables, timeout=60, status=status)


def call_here(
    fake: Fake, main: Callable[[list[str]], int], *arguments: str, status: int | None = 0, **env: str
) -> Completed:
    """Call a command in this process without cached outputs of the scheduler. A fork would take 0.4 s more."""
    with mock.patch.multiple(scheduler, FAILURE_CACHE={}, QUEUE_CACHE={}):
        return in_process.call(main, *arguments, cwd=ROOT, status=status, **fake.environment(**env))


def report(fake: Fake, *arguments: str, status: int | None = 0) -> Completed:
    """Call `python -m slurm` in this process, with a verb that starts no other process."""
    return call_here(fake, slurm_main, *arguments, status=status)
