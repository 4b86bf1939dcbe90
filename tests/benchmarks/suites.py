"""Times of the test suites, and their slowest tests.

    python -m tests.benchmarks.suites ["make test=3" "make test-all=1" "make test-slurm=1"]

Runs each suite as often as the number says, through make as a person does, and prints its slowest tests.
The times of one day are added to its record.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from common.config.config import ROOT
from tests.benchmarks.measure import summarize_values
from tests.benchmarks.records import Record, Row, Table

BUDGETS = {"make test": 180, "make test-all": 600, "make test-slurm": 900}  # seconds
SHOWN = 10
SLOW = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", re.MULTILINE)
ORIGIN = {"title": "test suites", "command": "python -m tests.benchmarks.suites"}


def run_suite(suite: str) -> tuple[float, list[tuple[float, str]]]:
    """Run a suite; return its seconds, and seconds and name of its slowest tests. Raises RuntimeError if it fails."""
    environ = os.environ | {"PYTEST_ADDOPTS": f"--durations={SHOWN}"}
    began = time.monotonic()
    done = subprocess.run(suite.split(), cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - began
    logs = ROOT / "tests" / "benchmarks" / "results"
    logs.mkdir(exist_ok=True)
    (logs / f"{suite.replace(' ', '-')}.log").write_text(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-3000:]}\n{suite} failed after {seconds:.0f} s")
    return seconds, [(float(found[1]), found[2]) for found in SLOW.finditer(done.stdout)]


def tabulate_times(known: dict[str, list[float]]) -> Table:
    """Return the times of each suite beside its budget."""
    rows = [
        Row(
            f"`{suite}`",
            [summarize_values(times), str(len(times))],
            BUDGETS[suite],
            at_least=False,
        )
        for suite, times in known.items()
    ]
    return Table(("suite", "seconds", "runs"), rows)


def main(wanted: list[str]) -> int:
    record = Record()
    if unknown := [word for word in wanted if word.partition("=")[0] not in BUDGETS]:
        raise RuntimeError(f"unknown suite {unknown[0]!r}; known are {', '.join(BUDGETS)}, as in 'make test=3'")
    known = record.content["parts"].get("suites/times", {}).get("seconds", {})
    for word in wanted:
        suite, _, times = word.partition("=")
        for _ in range(int(times or 1)):
            seconds, slowest = run_suite(suite)
            known.setdefault(suite, []).append(round(seconds, 1))
            print(f"{suite}: {seconds:.0f} s", flush=True)
            for test_seconds, name in slowest[:SHOWN]:
                print(f"  {test_seconds:4.0f} s  {name}", flush=True)
            record.put_table(
                "suites/times",
                ORIGIN | {"rounds": max(map(len, known.values())), "seconds": known},
                tabulate_times(known),
            )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:] or [f"{suite}=1" for suite in BUDGETS]))
    except RuntimeError as error:
        sys.exit(str(error))
