"""`make test-all` omits most of the tests with the marker `drawn`, and `make verify` executes all of them."""

from __future__ import annotations

import sys

import pytest

from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment
from tests.harness.environment.randomness import ALL_CASES_VARIABLE, SEED_VARIABLE, is_test_drawn

FILE = "tests/complete/test_fork_server.py"  # all of its tests have the marker


def list_chosen_tests(**env: str) -> set[str]:
    """Return the tests of a file that `make test-all` executes."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not omitted", FILE]
    variables = make_environment(PYTEST_ADDOPTS="-p no:cacheprovider -o addopts=--strict-markers", **env)
    completed = execution.execute_command(command, env=variables, timeout=120, real_process=True)
    return {line for line in completed.stdout.splitlines() if line.startswith(FILE)}


@pytest.mark.slow
def test_most_of_the_drawn_tests_are_omitted_unless_all_cases_are_executed() -> None:
    every_test = list_chosen_tests(**{ALL_CASES_VARIABLE: "1"})
    drawn_tests = list_chosen_tests(**{ALL_CASES_VARIABLE: "", SEED_VARIABLE: "1"})
    assert drawn_tests
    assert drawn_tests < every_test


def list_drawn_numbers(monkeypatch: pytest.MonkeyPatch, seed: str) -> list[int]:
    """Return which of 1,000 tests are drawn with a seed."""
    monkeypatch.setenv(SEED_VARIABLE, seed)
    return [number for number in range(1000) if is_test_drawn(f"test {number}")]


def test_about_a_sixth_of_the_tests_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL_CASES_VARIABLE, raising=False)
    first = list_drawn_numbers(monkeypatch, "1")
    second = list_drawn_numbers(monkeypatch, "2")
    assert 110 < len(first) < 230
    assert first != second
