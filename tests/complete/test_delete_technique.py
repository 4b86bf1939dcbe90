"""A technique is deleted from a clone, and lint, test collection and the unit tests of the rest pass."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.chance import open_stream
from tests.harness.delete_technique import DELETABLE, delete_technique
from tests.harness.processes import environment
from tests.harness.warm import ROOT

PYTEST = (".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", "-q")
PAGES = "tests/commands/test_readme.py"
LINKS = (f"{PAGES}::test_links_lead_somewhere", f"{PAGES}::test_every_pitfall_names_the_tests_that_show_it")


@pytest.mark.skipif(not DELETABLE, reason="no technique belongs to one experiment alone")
def test_nothing_else_needs_a_technique(tmp_path: Path) -> None:
    technique = open_stream("the deleted technique").choice(sorted(DELETABLE))
    place = tmp_path / "clone"
    delete_technique(technique, place)
    if (ROOT / ".mypy_cache").exists():  # mypy takes half a minute without it
        shutil.copytree(ROOT / ".mypy_cache", place / ".mypy_cache")
    commands = (
        ("make", "lint"),
        (*PYTEST, "--collect-only", "tests"),
        (*PYTEST, "-n", "2", "tests/unit", *LINKS),
    )
    for command in commands:
        done = subprocess.run(
            command, cwd=place, env=environment(PYTEST_ADDOPTS=""), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"without {technique}: {' '.join(command)}\n{done.stdout}{done.stderr}"
