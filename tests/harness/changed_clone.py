"""Check a clone with a technique less and an experiment more: lint, test collection, and the unit tests.

    python -m tests.harness.changed_clone [--technique local_sgd]

`make test-all` executes this program after its tests, because its workers would slow down tests with time limits. It
draws the technique and prints the seed. All tests are collected. Those of the folder `unit` are executed, those of the
new experiment as make new-experiment writes it, and those of the pages. `make test-slurm` starts clusters, this does
not.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness.chance import open_stream
from tests.harness.delete_technique import DELETABLE, delete_technique, list_committed_files
from tests.harness.processes import environment
from tests.harness.warm import ROOT

SELECTION = "unit or my_mlp or list_is_complete or experiment_has or page_says or links_lead or every_pitfall"
# The tests of the contributing page train a new experiment with the same command as its page.
OMITTED = (
    "tests/cluster",
    "tests/commands/test_new_experiment.py",
    "tests/complete/test_page_commands.py::test_every_command_runs[python experiments/my_mlp.py]",
)
TESTS = (
    *(".venv/bin/python", "-m", "pytest", "-vv", "--numprocesses", "4", "--dist", "worksteal"),
    *(word for omitted in OMITTED for word in ("--deselect", omitted)),
    *("-k", SELECTION, "tests"),
)
LINT = ("make", "lint")


def make_clone(technique: str, place: Path) -> None:
    """Make the clone without the technique and with an experiment that learns slowly."""
    delete_technique(technique, place)
    subprocess.run(["make", "new-experiment", "NAME=my_mlp"], cwd=place, env=environment(), check=True)
    values = place / "configs" / "my_mlp.yaml"
    values.write_text(values.read_text().replace("lr: 0.02", "lr: 0.000001"))
    if (ROOT / ".mypy_cache").exists():  # mypy takes half a minute without it
        shutil.copytree(ROOT / ".mypy_cache", place / ".mypy_cache")


def start(command: tuple[str, ...], place: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a command in the clone without the options of an outer pytest. Its output goes to the log."""
    with open(log, "w") as file:
        return subprocess.Popen(command, cwd=place, env=environment(PYTEST_ADDOPTS=""), stdout=file, stderr=file)


def check_clone(place: Path) -> list[str]:
    """Execute lint and the tests. Return the output of each command that failed."""
    lint_log = place.with_name("lint.log")
    tests_log = place.with_name("tests.log")
    lint = start(LINT, place, lint_log)  # beside the tests, which often wait
    tests = start(TESTS, place, tests_log)
    failed = []
    if tests.wait():
        failed.append(tests_log.read_text())
    elif len(re.findall(r"PASSED tests/\S+\[\S*my_mlp", tests_log.read_text())) <= 20:
        failed.append(f"too few tests of the new experiment were executed\n{tests_log.read_text()}")
    if lint.wait():
        failed.append(lint_log.read_text())
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--technique", choices=sorted(DELETABLE), help="the technique to delete (drawn by default)")
    technique = parser.parse_args().technique
    committed = [name for name in sorted(DELETABLE) if list_committed_files(Path("common/techniques") / name)]
    if not committed:
        print("changed clone skipped: no technique belongs to one experiment alone")
        return 0
    technique = technique or open_stream("the deleted technique").choice(committed)
    print(f"checking a clone without {technique} and with a new experiment", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="changed-clone-") as folder:
        place = Path(folder) / "clone"
        make_clone(technique, place)
        failed = check_clone(place)
    seconds = time.monotonic() - started
    for output in failed:
        print(output)
    print(f"changed clone without {technique}: {'failed' if failed else 'passed'}, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
