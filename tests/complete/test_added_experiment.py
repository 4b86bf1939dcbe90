"""An experiment that `make new-experiment` created passes the tests of all experiments."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment
from tests.harness.environment.randomness import ALL_CASES_VARIABLE
from tests.harness.verification.delete_technique import clone_checkout

FOLDERS = ("tests/commands", "tests/experiments", "tests/parity", "tests/recovery")
FILES = ("tests/complete/test_benchmarks.py", "tests/complete/test_page_commands.py")
SELECTION = "my_mlp or list_is_complete or experiment_has or page_says or links_lead or every_pitfall"
OMITTED = (
    # These tests train a new experiment with the command of its page, as tests/commands/test_new_experiment.py does.
    "tests/commands/test_new_experiment.py",
    "tests/complete/test_page_commands.py::test_every_command_runs[python experiments/my_mlp.py]",
    # The page of a new experiment says that its table is not recorded yet.
    "tests/commands/test_numbers.py::test_every_table_without_a_caption_is_recorded[experiments/my_mlp.md]",
)
MIN_TESTS = 20


@pytest.mark.drawn
def test_an_added_experiment_passes_the_tests_of_all_experiments(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone_checkout(clone)
    subprocess.run(["make", "new-experiment", "NAME=my_mlp"], cwd=clone, env=make_environment(), check=True)
    settings = clone / "configs" / "my_mlp.yaml"
    slow_learner = settings.read_text().replace("lr: 0.02", "lr: 0.000001")
    settings.write_text(slow_learner)

    omitted = [f"--deselect={test}" for test in OMITTED]
    # A test that waits forever ends before this one, so that its name and its stack are printed.
    options = ["-vv", "-o", "timeout=200", "-k", SELECTION]
    pytest = [".venv/bin/python", "-m", "pytest", *options, *omitted, *FOLDERS, *FILES]
    # A draw of cases could omit the experiment.
    env = make_environment(PYTEST_ADDOPTS="", **{ALL_CASES_VARIABLE: "1"})
    env.pop("PYTEST_XDIST_WORKER", None)  # this pytest is not a worker, and shares no folders with other test runs
    completed = execution.execute_command(pytest, cwd=clone, env=env, timeout=3600, real_process=True, status=0)
    assert len(re.findall(r"\[\S*my_mlp\S*\] PASSED", completed.stdout)) > MIN_TESTS
