"""Folders for make, and what it hands over: the words behind a target, told by a python that only writes them down."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from slurm.__main__ import translate_target
from tests.harness import inside
from tests.harness.processes import environment, script
from tests.harness.warm import ROOT


def copy_checkout(place: Path, *more: str) -> Path:
    """A copy of the project's source, and of the folders `more`, in which make finds everything set up."""
    for name in ("common", "configs", "experiments", "slurm", *more):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, place)
    script(place / ".venv/bin/python", f'PYTHONPATH="{place}" exec "{sys.executable}" "$@"')
    (place / ".venv/.ready").touch()
    return place


def handed_over(place: Path, *words: str) -> list[str]:
    """The words after `python -m slurm` for which `make` with these words stands."""
    script(place / ".venv/bin/python", "printf '%s\\0' \"$@\" > words; env -0 > environ")
    done = subprocess.run(
        ["make", *words], cwd=place, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found, environ = (read_list(place / name) for name in ("words", "environ"))
    assert found[:3] == ["-m", "slurm", "--make"] and len(found) == 4
    return translate_target(found[3], dict(line.split("=", 1) for line in environ))


def read_list(file: Path) -> list[str]:
    """The words in a file, each ended by a zero byte; the file is removed."""
    found = file.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    file.unlink()
    return found


def call(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Let make hand over, and call the command within this process, in make's folder."""
    return inside.run_verb(*handed_over(place, *words), cwd=place)
