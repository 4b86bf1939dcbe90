"""Call commands of the project in the process of the test, which is faster than a fork.

For commands that start no other process.
"""

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
from tests.harness.commands.processes import make_environment
from tests.harness.repository import ROOT


def call_main(
    function: Callable[[list[str]], int], *arguments: str, cwd: Path = ROOT, status: int | None = 0, **env: str
) -> Completed:
    """Call the main() of a command, as its module does, and check the exit status, unless `status` is None."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    with set_folder_and_environment(cwd, env), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            with exit_on_user_error():
                returncode = function(list(arguments))
        except SystemExit as system_exit:
            assert isinstance(system_exit.code, int | None), system_exit.code
            returncode = system_exit.code or 0
    completed = subprocess.CompletedProcess(list(arguments), returncode, stdout.getvalue(), stderr.getvalue())
    check_status(completed, status)
    return completed


def call_verb(verb: str, *arguments: str, cwd: Path = ROOT, status: int | None = 0, **env: str) -> Completed:
    """Call `python -m slurm VERB` in this process, and check the exit status, unless `status` is None."""
    return call_main(main, verb, *arguments, cwd=cwd, status=status, **env)


@contextlib.contextmanager
def set_folder_and_environment(cwd: Path, env: dict[str, str]) -> Iterator[None]:
    """Use a folder and the environment of a command in the `with` block."""
    original_environment = dict(os.environ)
    command_environment = make_environment(**env)
    try:
        os.environ.clear()
        os.environ.update(command_environment)
        with contextlib.chdir(cwd):
            yield
    finally:
        os.environ.clear()
        os.environ.update(original_environment)
