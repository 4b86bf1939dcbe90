"""SLURM's commands as scripts that answer as they are told, and commands of the project that meet them."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from slurm.__main__ import main as slurm_main
from slurm.scheduling import scheduler
from tests.harness import inside, warm
from tests.harness.processes import environment
from tests.harness.warm import ROOT


class Fake:
    """SLURM's commands as scripts on PATH; each writes down how it was called."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls = folder / "bin", folder / "calls"
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
        script = self.bin / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.calls}"\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IEXEC)

    def environment(self, **extra: str) -> dict[str, str]:
        path = f"{self.bin}:{Path(sys.executable).parent}:/usr/bin:/bin"
        nowhere = str(self.bin.parent / "no-cluster")
        return environment(**{"PATH": path, "SLURM_CONF": str(self.conf), "CLUSTER_DIR": nowhere} | extra)


def call(fake: Fake, module: str, *words: str, source: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """A command of the project's sources in `source`: of its own checkout as a fork of a warm process."""
    argv = [sys.executable, "-m", module, *words]
    return warm.execute(argv, cwd=source, env=fake.environment(PYTHONPATH=str(source), **env), timeout=60)


def call_here(
    fake: Fake, main: Callable[[list[str]], int], *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """A command within this process, which knows no earlier answer of the scheduler. A fork would take 0.4 s more."""
    with mock.patch.multiple(scheduler, FAILURE_CACHE={}, QUEUE_CACHE={}):
        return inside.call(main, *words, cwd=ROOT, **fake.environment(**env))


def report(fake: Fake, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m slurm` with a verb that starts nothing, within this process."""
    return call_here(fake, slurm_main, *words)
