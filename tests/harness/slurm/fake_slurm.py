"""Replace the commands of SLURM by scripts with fixed outputs, and execute commands of the project that call them."""

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
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import WAIT_TIMEOUT, make_environment
from tests.harness.repository import ROOT


class FakeSlurm:
    """Scripts that replace the commands of SLURM. Each appends its command line to `calls_file`."""

    def __init__(self, folder: Path) -> None:
        self.bin_folder = folder / "bin"
        self.calls_file = folder / "calls"
        self.bin_folder.mkdir()
        self.slurm_conf = folder / "slurm.conf"
        self.slurm_conf.touch()
        self.define_command(
            "scontrol", 'case "$1" in ping) echo "Slurmctld(primary) at ctl is UP";; *) echo "JobState=RUNNING";; esac'
        )
        self.define_command("sbatch", 'cat "$1" >/dev/null; echo "Submitted batch job 4711"')
        self.define_command("squeue", "echo '4711|RUNNING|None'")
        self.define_command("sinfo", "echo 4")
        self.define_command("sacct", "echo COMPLETED")
        self.define_command("scancel", "exit 0")

    def define_command(self, name: str, body: str) -> None:
        """Write the script of a command."""
        script = self.bin_folder / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.calls_file}"\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IEXEC)

    def make_environment(self, **extra: str) -> dict[str, str]:
        path = f"{self.bin_folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
        missing_cluster = str(self.bin_folder.parent / "no-cluster")
        variables = {"PATH": path, "SLURM_CONF": str(self.slurm_conf), "CLUSTER_DIR": missing_cluster}
        return make_environment(**variables | extra)


def execute_module(
    fake: FakeSlurm, module: str, *arguments: str, source: Path = ROOT, status: int | None = 0, **env: str
) -> Completed:
    """Execute a module of the sources in the folder `source`, by default of this checkout.

    Its exit status is checked, unless `status` is None.
    """
    command = [sys.executable, "-m", module, *arguments]
    variables = fake.make_environment(PYTHONPATH=str(source), **env)
    return execution.execute_command(command, cwd=source, env=variables, timeout=WAIT_TIMEOUT, status=status)


def execute_module_on_full_disk(fake: FakeSlurm, module: str, *arguments: str, **env: str) -> int:
    """Execute a module whose output is redirected to a file on a full disk. Return the exit status."""
    command = [sys.executable, "-m", module, *arguments]
    with open("/dev/full", "w") as full_disk:
        process = subprocess.run(
            command, cwd=ROOT, env=fake.make_environment(**env), stdout=full_disk, stderr=full_disk, check=False
        )
    return process.returncode


def call_main(
    fake: FakeSlurm, main: Callable[[list[str]], int], *arguments: str, status: int | None = 0, **env: str
) -> Completed:
    """Call the main() of a command in this process, without cached outputs of SLURM. This is faster than a fork."""
    with mock.patch.multiple(scheduler, FAILURE_CACHE={}, QUEUE_CACHE={}, CLUSTER_NAME_CACHE={}):
        return in_process_calls.call_main(main, *arguments, cwd=ROOT, status=status, **fake.make_environment(**env))


def call_slurm(fake: FakeSlurm, *arguments: str, status: int | None = 0) -> Completed:
    """Call a verb of `python -m slurm` that starts no other process in this process."""
    return call_main(fake, slurm_main, *arguments, status=status)
