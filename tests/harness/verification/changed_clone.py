"""Check a clone without a technique: lint, test collection, and a tenth of the unit tests.

    python -m tests.harness.verification.changed_clone [--technique local_sgd]

`make test-all` executes this program after its tests, because the processes of this program would slow down tests with
time limits. The technique is drawn; the program prints the seed. The files of unit tests are drawn, too; `make verify`
executes all of them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness.commands.processes import make_environment
from tests.harness.environment.randomness import create_random, draw_cases
from tests.harness.repository import ROOT
from tests.harness.verification.delete_technique import (
    DELETABLE_TECHNIQUES,
    delete_technique,
    list_committed_files,
)

PYTEST_COMMAND = (".venv/bin/python", "-m", "pytest")


def list_checks(clone: Path) -> dict[str, tuple[str, ...]]:
    """Return the commands that check the clone. They are executed in parallel, because unit tests often wait."""
    files = sorted(str(file.relative_to(clone)) for file in (clone / "tests" / "unit").rglob("test_*.py"))
    drawn_files = draw_cases("the unit tests of a changed clone", files, len(files) // 10)
    # Without this option, pytest would also delete the folders of earlier test runs, which can take minutes.
    base_folder = ("--basetemp", str(clone.with_name("pytest")))
    return {
        "lint": ("make", "lint"),
        "collection": (*PYTEST_COMMAND, "--collect-only", "tests"),
        "unit tests": (*PYTEST_COMMAND, *base_folder, "--numprocesses", "4", "--dist", "worksteal", *drawn_files),
    }


def start_command(command: tuple[str, ...], clone: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a command in the clone without the options of an outer pytest. Its output goes to the log."""
    with open(log, "w") as file:
        env = make_environment(PYTEST_ADDOPTS="")
        return subprocess.Popen(command, cwd=clone, env=env, stdout=file, stderr=file)


def check_clone(clone: Path) -> dict[str, str]:
    """Execute the checks. Return the output of each check that failed."""
    processes = {}
    logs = {}
    for name, command in list_checks(clone).items():
        logs[name] = clone.with_name(f"{name}.log")
        processes[name] = start_command(command, clone, logs[name])

    failed = {}
    for name, process in processes.items():
        if process.wait() != 0:
            failed[name] = logs[name].read_text()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--technique", choices=sorted(DELETABLE_TECHNIQUES), help="the technique to delete (drawn by default)"
    )
    technique = parser.parse_args().technique
    committed = [
        name for name in sorted(DELETABLE_TECHNIQUES) if list_committed_files(Path("common/techniques") / name)
    ]
    if not committed:
        print("changed clone skipped: no technique belongs to one experiment alone")
        return 0
    technique = technique or create_random("the deleted technique").choice(committed)

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="changed-clone-") as folder:
        clone = Path(folder) / "clone"
        delete_technique(technique, clone)
        if (ROOT / ".mypy_cache").exists():  # mypy takes half a minute without it
            shutil.copytree(ROOT / ".mypy_cache", clone / ".mypy_cache")
        failed = check_clone(clone)
    seconds = time.monotonic() - started
    for name, output in failed.items():
        print(f"{name} of the clone without {technique}:\n{output}")
    verdict = f"{' and '.join(failed)} failed" if failed else "passed"
    print(f"clone without {technique}: lint, collection and unit tests: {verdict}, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
