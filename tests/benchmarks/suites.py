"""Times of the test suites, and their slowest tests.

    python -m tests.benchmarks.suites ["make test=3" "make test-all=1" "make test-slurm=1"]

Runs each suite as often as the number says, through make as a person does, and prints its slowest tests.
The times of the same day and commit are added to its record.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from common.config.config import ROOT
from tests.benchmarks.measure import summarize_values
from tests.benchmarks.records import Cell, Record, Row, Table

BUDGETS = {"make test": 150, "make test-all": 500, "make test-slurm": 800}  # seconds
SLOW = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", re.MULTILINE)
ORIGIN = {"title": "test suites", "command": "python -m tests.benchmarks.suites"}


TEST_COUNT = 10  # slowest tests of a suite that are printed


def run_suite(suite: str) -> tuple[float, list[tuple[float, str]]]:
    """Run a suite; return its seconds, and seconds and name of its slowest tests. Raises RuntimeError if it fails."""
    environ = os.environ | {"PYTEST_ADDOPTS": f"--durations={TEST_COUNT}"}
    start = time.monotonic()
    process = subprocess.run(suite.split(), cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - start
    logs = ROOT / "tests" / "benchmarks" / "results"
    logs.mkdir(exist_ok=True)
    (logs / f"{suite.replace(' ', '-')}.log").write_text(process.stdout)
    if process.returncode:
        raise RuntimeError(f"{process.stdout[-3000:]}\n{suite} failed after {seconds:.0f} s")
    slowest = [(float(match[1]), match[2]) for match in SLOW.finditer(process.stdout)]
    return seconds, slowest


def tabulate_times(seconds_of: dict[str, list[float]]) -> Table:
    """Return the times of each suite beside its budget."""
    rows = []
    for suite, times in seconds_of.items():
        cells: list[Cell] = [summarize_values(times), str(len(times))]
        rows.append(Row(f"`{suite}`", cells, BUDGETS[suite], at_least=False))
    return Table(("suite", "seconds", "runs"), rows)


def main(arguments: list[str]) -> int:
    record = Record()
    unknown = [argument for argument in arguments if argument.partition("=")[0] not in BUDGETS]
    if unknown:
        raise RuntimeError(f"unknown suite {unknown[0]!r}; known are {', '.join(BUDGETS)}, as in 'make test=3'")
    seconds_of = record.find_part("suites/times").get("seconds", {})
    for argument in arguments:
        suite, _, times = argument.partition("=")
        for _ in range(int(times or 1)):
            seconds, slowest = run_suite(suite)
            seconds_of.setdefault(suite, []).append(round(seconds, 1))
            print(f"{suite}: {seconds:.0f} s", flush=True)
            for test_seconds, name in slowest[:TEST_COUNT]:
                print(f"  {test_seconds:4.0f} s  {name}", flush=True)
            content = ORIGIN | {"rounds": max(map(len, seconds_of.values())), "seconds": seconds_of}
            record.put_table("suites/times", content, tabulate_times(seconds_of))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:] or [f"{suite}=1" for suite in BUDGETS]))
    except RuntimeError as error:
        sys.exit(str(error))
