"""The list of planted mistakes fits the code. `make verify` plants them and runs their tests."""

from __future__ import annotations

from tests.benchmarks.planted_mistakes import MISTAKES, list_problems
from tests.harness.repository import ROOT


def test_every_mistake_can_be_planted() -> None:
    problems = list_problems(MISTAKES)
    assert not problems, "adapt the mistakes to the code:\n" + "\n".join(problems)


def test_the_test_of_every_mistake_exists() -> None:
    missing = []
    for mistake in MISTAKES:
        file, _, test_id = mistake.caught_by.partition("::")
        function = test_id.partition("[")[0]
        definition = f"def {function}(" if function else "def test_"
        path = ROOT / file
        if not path.is_file() or definition not in path.read_text():
            missing.append(f"{mistake.name}: {mistake.caught_by} does not exist")
    assert not missing, "name a test that notices the mistake:\n" + "\n".join(missing)
