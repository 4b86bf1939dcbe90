"""Folders for make, and the command behind a target, which a replaced python records instead of executing it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from slurm.__main__ import translate_target
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import make_environment, write_script
from tests.harness.repository import ROOT


def copy_checkout(place: Path, *additional_folders: str) -> Path:
    """Copy the product code and additional folders, with an environment that make considers ready."""
    for name in ("common", "configs", "experiments", "slurm", *additional_folders):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, place)
    write_script(place / ".venv/bin/python", f'PYTHONPATH="{place}" exec "{sys.executable}" "$@"')
    (place / ".venv/.ready").touch()
    return place


def record_slurm_arguments(place: Path, *make_arguments: str) -> list[str]:
    """Return the arguments of `python -m slurm` that `make` with these arguments executes."""
    write_script(place / ".venv/bin/python", "printf '%s\\0' \"$@\" > arguments; env -0 > environ")
    argv = ["make", *make_arguments]
    process = subprocess.run(
        argv, cwd=place, env=make_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    python_arguments = take_null_separated(place / "arguments")
    assert python_arguments[:3] == ["-m", "slurm", "--make"]
    assert len(python_arguments) == 4
    variables = dict(line.split("=", 1) for line in take_null_separated(place / "environ"))
    return translate_target(python_arguments[3], variables)


def take_null_separated(file: Path) -> list[str]:
    """Return the strings in a file, each followed by a zero byte, and delete the file."""
    text = file.read_bytes().decode(errors="surrogateescape")
    file.unlink()
    return text.split("\0")[:-1]


def call_target(place: Path, *make_arguments: str) -> subprocess.CompletedProcess[str]:
    """Execute the command behind a target in this process, in make's folder."""
    return in_process_calls.call_verb(*record_slurm_arguments(place, *make_arguments), cwd=place)
