"""A new experiment passes what every experiment must do, as make new-experiment writes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.harness.making import copy_checkout
from tests.harness.processes import environment

TESTS = (
    *("experiments", "unit/core/test_config.py", "unit/core/test_limits.py", "commands/test_new_experiment.py"),
    *("commands/test_readme.py", "commands/test_numbers.py"),
    *("complete/test_page_commands.py", "complete/test_benchmarks.py"),
)


def test_the_tests_of_every_experiment_pass(tmp_path: Path) -> None:
    place = copy_checkout(tmp_path / "checkout", "tests")
    subprocess.run(["make", "new-experiment", "NAME=my_mlp"], cwd=place, env=environment(), check=True)
    values = place / "configs" / "my_mlp.yaml"
    values.write_text(values.read_text().replace("lr: 0.02", "lr: 0.000001"))  # one that learns slowly
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-k",
        "my_mlp or list_is_complete or experiment_has or page_says",
    ]
    words += [f"--basetemp={tmp_path / 'temporary'}", *(f"tests/{name}" for name in TESTS)]
    env = environment(PYTHONPATH=str(place))
    done = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) > 20
