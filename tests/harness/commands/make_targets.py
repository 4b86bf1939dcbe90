"""Find out which command a target of the Makefile executes, and call this command in the process of the test.

A script replaces .venv/bin/python and records its arguments.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from slurm.__main__ import translate_target
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import WAIT_TIMEOUT, make_environment, write_script
from tests.harness.repository import ROOT


def copy_checkout(target_folder: Path, *additional_folders: str) -> Path:
    """Copy the product code and additional folders, and create a .venv that make considers complete."""
    for name in ("common", "configs", "experiments", "slurm", *additional_folders):
        shutil.copytree(ROOT / name, target_folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target_folder)
    write_script(target_folder / ".venv/bin/python", f'PYTHONPATH="{target_folder}" exec "{sys.executable}" "$@"')
    (target_folder / ".venv/.ready").touch()
    return target_folder


def record_slurm_arguments(folder: Path, *make_arguments: str) -> list[str]:
    """Return the arguments of `python -m slurm` that `make` with these arguments executes."""
    write_script(folder / ".venv/bin/python", "printf '%s\\0' \"$@\" > arguments; env -0 > environ")
    argv = ["make", *make_arguments]
    env = make_environment()
    process = subprocess.run(
        argv,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    python_arguments = take_null_separated(folder / "arguments")
    assert python_arguments[:3] == ["-m", "slurm", "--make"]
    assert len(python_arguments) == 4
    variables = dict(line.split("=", 1) for line in take_null_separated(folder / "environ"))
    return translate_target(python_arguments[3], variables)


def take_null_separated(file: Path) -> list[str]:
    """Return the strings in a file, each of which ends with a null byte, and delete the file."""
    text = file.read_bytes().decode(errors="surrogateescape")
    file.unlink()
    return text.split("\0")[:-1]


def call_target(folder: Path, *make_arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command that a target executes, in the folder of the Makefile."""
    return in_process_calls.call_verb(*record_slurm_arguments(folder, *make_arguments), cwd=folder, status=None)
