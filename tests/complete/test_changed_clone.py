"""A clone with a technique less and an experiment more passes lint, test collection and its unit tests.

The tests that every experiment must pass are executed for the new one, as make new-experiment writes it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.chance import open_stream
from tests.harness.delete_technique import DELETABLE, delete_technique, list_committed_files
from tests.harness.processes import environment
from tests.harness.warm import ROOT

# All tests are collected. Those of the folder `unit` are executed, those of the new experiment, and those of the pages.
# None of them starts a SLURM cluster: `make test-slurm` does that.
SELECTION = "unit or my_mlp or list_is_complete or experiment_has or page_says or links_lead or every_pitfall"
TESTS = (".venv/bin/python", "-m", "pytest", "-vv", "-n", "2", "--deselect", "tests/cluster", "-k", SELECTION, "tests")


@pytest.mark.skipif(not DELETABLE, reason="no technique belongs to one experiment alone")
def test_a_technique_can_be_deleted_and_an_experiment_added(tmp_path: Path) -> None:
    committed = [name for name in sorted(DELETABLE) if list_committed_files(Path("common/techniques") / name)]
    technique = open_stream("the deleted technique").choice(committed)
    place = tmp_path / "clone"
    delete_technique(technique, place)
    subprocess.run(["make", "new-experiment", "NAME=my_mlp"], cwd=place, env=environment(), check=True)
    values = place / "configs" / "my_mlp.yaml"
    values.write_text(values.read_text().replace("lr: 0.02", "lr: 0.000001"))  # one that learns slowly
    if (ROOT / ".mypy_cache").exists():  # mypy takes half a minute without it
        shutil.copytree(ROOT / ".mypy_cache", place / ".mypy_cache")

    commands = {"tests": TESTS, "lint": ("make", "lint")}
    # At the same time: tests often wait, and leave time for lint.
    processes = {name: start(name, command, place) for name, command in commands.items()}
    statuses = {name: process.wait() for name, process in processes.items()}
    passed = re.findall(r"PASSED tests/\S+\[\S*my_mlp", (tmp_path / "tests.log").read_text())
    if statuses["tests"]:  # once more, because short time limits can pass on a busy machine
        statuses["tests"] = start("tests", (*TESTS, "--last-failed"), place).wait()
    for name, status in statuses.items():
        assert status == 0, f"without {technique}: {(tmp_path / f'{name}.log').read_text()}"
    assert len(passed) > 20


def start(name: str, command: tuple[str, ...], place: Path) -> subprocess.Popen[bytes]:
    """Start a command in the clone, without the options of this pytest. NAME.log beside the clone gets its output."""
    with open(place.with_name(f"{name}.log"), "w") as log:
        return subprocess.Popen(command, cwd=place, env=environment(PYTEST_ADDOPTS=""), stdout=log, stderr=log)
