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
from tests.harness.commands.processes import make_environment
from tests.harness.repository import ROOT


def call_main(
    function: Callable[[list[str]], int], *arguments: str, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Call the main() of a command, as its module does; return the output and the exit status."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    with set_folder_and_environment(cwd, env), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            with exit_on_user_error():
                status = function(list(arguments))
        except SystemExit as system_exit:
            assert isinstance(system_exit.code, int | None), system_exit.code
            status = system_exit.code or 0
    return subprocess.CompletedProcess(list(arguments), status, stdout.getvalue(), stderr.getvalue())


def call_verb(verb: str, *arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Call `python -m slurm VERB` in this process."""
    return call_main(main, verb, *arguments, cwd=cwd, **env)


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
