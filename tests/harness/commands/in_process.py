"""Call commands of the project in the process of the test: for tests of many commands that start no other process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from common.system.errors import exit_on_user_error
from slurm.__main__ import main
from tests.harness.commands.exit_status import Completed, check_status
from tests.harness.commands.processes import environment
from tests.harness.commands.warm import ROOT


def call(
    function: Callable[[list[str]], int], *arguments: str, cwd: Path = ROOT, status: int | None = 0, **env: str
) -> Completed:
    """Call a command's main() as its module does when it is executed; return its outputs and its exit status.

    The exit status is checked, unless `status` is None.
    """
    stdout = io.StringIO()
    stderr = io.StringIO()
    with change_context(cwd, env), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            with exit_on_user_error():
                returncode = function(list(arguments))
        except SystemExit as system_exit:
            assert isinstance(system_exit.code, int | None), system_exit.code
            returncode = system_exit.code or 0
    completed = subprocess.CompletedProcess(list(arguments), returncode, stdout.getvalue(), stderr.getvalue())
    check_status(completed, status)
    return completed


def run_verb(verb: str, *arguments: str, cwd: Path = ROOT, status: int | None = 0, **env: str) -> Completed:
    """Call `python -m slurm VERB` in this process, and check its exit status, unless `status` is None."""
    return call(main, verb, *arguments, cwd=cwd, status=status, **env)


@contextlib.contextmanager
def change_context(cwd: Path, env: dict[str, str]) -> Iterator[None]:
    """Set the folder, and the environment of a command that a test starts."""
    original_environment = dict(os.environ)
    command_environment = environment(**env)
    try:
        os.environ.clear()
        os.environ.update(command_environment)
        with contextlib.chdir(cwd):
            yield
    finally:
        os.environ.clear()
        os.environ.update(original_environment)
