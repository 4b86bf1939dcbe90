"""Commands of the project called within the test's own process: for many words, of which few ever start anything."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from common.system.errors import exit_on_user_error
from slurm.__main__ import main
from tests.harness.processes import environment
from tests.harness.warm import ROOT


def call(
    function: Callable[[list[str]], int], *words: str, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Call a command's main() as its module does when it is executed: what it says, and its exit status."""
    out, err = io.StringIO(), io.StringIO()
    with placed(cwd, env), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with exit_on_user_error():
                status = function(list(words))
        except SystemExit as end:
            assert isinstance(end.code, int | None), end.code
            status = end.code or 0
    return subprocess.CompletedProcess(list(words), status, out.getvalue(), err.getvalue())


def run_verb(verb: str, *words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m slurm VERB` within this process."""
    return call(main, verb, *words, cwd=cwd, **env)


@contextlib.contextmanager
def placed(cwd: Path, env: dict[str, str]) -> Iterator[None]:
    """The environment of a command that a test starts, and its folder."""
    before, wanted = dict(os.environ), environment(**env)
    try:
        os.environ.clear()
        os.environ.update(wanted)
        with contextlib.chdir(cwd):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
