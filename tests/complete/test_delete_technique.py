"""A technique is deleted from a clone, and lint, test collection and the unit tests of the rest pass."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.chance import open_stream
from tests.harness.delete_technique import DELETABLE, delete_technique, list_committed_files
from tests.harness.processes import environment
from tests.harness.warm import ROOT

PYTEST = (".venv/bin/python", "-m", "pytest", "-q")
PAGES = "tests/commands/test_readme.py"
LINKS = (f"{PAGES}::test_links_lead_somewhere", f"{PAGES}::test_every_pitfall_names_the_tests_that_show_it")
UNIT_TESTS = (*PYTEST, "-n", "2", "tests/unit", *LINKS)


@pytest.mark.skipif(not DELETABLE, reason="no technique belongs to one experiment alone")
def test_nothing_else_needs_a_technique(tmp_path: Path) -> None:
    committed = [
        technique for technique in sorted(DELETABLE) if list_committed_files(Path("common/techniques") / technique)
    ]
    technique = open_stream("the deleted technique").choice(committed)
    place = tmp_path / "clone"
    delete_technique(technique, place)
    if (ROOT / ".mypy_cache").exists():  # mypy takes half a minute without it
        shutil.copytree(ROOT / ".mypy_cache", place / ".mypy_cache")
    commands = (UNIT_TESTS, ("make", "lint"), (*PYTEST, "-p", "no:cacheprovider", "--collect-only", "tests"))
    # At the same time: unit tests often wait.
    processes = [start(command, place) for command in commands]
    outputs = [process.communicate()[0] for process in processes]
    if processes[0].returncode:  # once more, because short time limits of tests can pass on a busy machine
        processes[0] = start((*UNIT_TESTS, "--last-failed"), place)
        outputs[0] += processes[0].communicate()[0]
    for command, process, output in zip(commands, processes, outputs, strict=True):
        assert process.returncode == 0, f"without {technique}: {' '.join(command)}\n{output}"


def start(command: tuple[str, ...], place: Path) -> subprocess.Popen[str]:
    """Start a command in the clone, without the options of this pytest."""
    return subprocess.Popen(
        command,
        cwd=place,
        env=environment(PYTEST_ADDOPTS=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
