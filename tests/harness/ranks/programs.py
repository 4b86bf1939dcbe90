"""Execute the programs of this package, and call functions on their ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from configs.shared import Launch
from tests.harness.commands import execution
from tests.harness.commands.processes import WAIT_TIMEOUT, find_processes, make_environment


def run_on_ranks(function: Callable[[World], object], size: int, settings: Launch) -> int:
    """Call a function on `size` forked ranks that have joined a world. Return the exit status of the launcher."""

    def join_and_call(rank_info: RankInfo) -> None:
        with rendezvous.join_world(rank_info, settings) as world:
            function(world)

    return local_launcher.run_ranks(join_and_call, size, 1, lambda: None)


def execute_program(name: str, *arguments: object, timeout: float = WAIT_TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Execute the program tests/harness/ranks/NAME.py with arguments."""
    command = [sys.executable, "-m", f"tests.harness.ranks.{name}", *map(str, arguments)]
    return execution.execute_command(command, env=make_environment(), timeout=timeout)


def execute_launch_case(case: str, folder: Path, backend: str = "auto") -> subprocess.CompletedProcess[str]:
    """Execute a case of launch_cases.py, and assert that no rank is left."""
    process = execute_program("launch_cases", case, folder, backend)
    assert not find_processes(str(folder))
    return process


def check_program(name: str, *arguments: object) -> None:
    """Execute a program, and assert that it succeeds."""
    process = execute_program(name, *arguments)
    assert process.returncode == 0, process.stdout + process.stderr
