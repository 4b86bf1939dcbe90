"""Execute every case of every list, every campaign, every planted mistake, and lint: `make verify`.

    python -m tests.harness.verification.verify [--only NAME ...] [--again]

There is no time budget. Steps that have passed at the commit that is checked out are not repeated, unless `--again` is
given, so that an interrupted verification continues. The results are in tests/benchmarks/results/verify.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from common.runs.folder import read_json, write_json
from common.system.errors import UserError, exit_on_user_error
from tests.harness.environment.randomness import ALL_CASES_VARIABLE
from tests.harness.repository import ROOT
from tests.harness.verification.delete_technique import DELETABLE_TECHNIQUES

WHOLE_LISTS: Mapping[str, str] = MappingProxyType({ALL_CASES_VARIABLE: "1", "PYTEST_TIMEOUT": "3600"})
"""Environment of the test suites. A test that executes a whole list may take an hour on a slow machine."""
FAST_FOLDERS = ("tests/unit", "tests/experiments", "tests/pitfalls", "tests/commands")
"""Folders of `make test`, which omits their slow tests unless TESTS is set."""
FURTHER_FOLDERS = ("tests/parity", "tests/recovery", "tests/complete")
"""Folders that `make test-all` tests in addition to `make test`.

Each folder is a separate step, so that a verification that is interrupted repeats less.
"""
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "verify.json"


class VerificationStep(NamedTuple):
    """A command that must exit with status 0."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = MappingProxyType({})


def list_steps() -> list[VerificationStep]:
    """Return the steps in the order of execution."""
    steps = [
        VerificationStep("lint", ("make", "lint")),
        VerificationStep("fast tests", ("make", "test", f"TESTS={' '.join(FAST_FOLDERS)}"), WHOLE_LISTS),
        *(VerificationStep(folder, ("make", "test", f"TESTS={folder}"), WHOLE_LISTS) for folder in FURTHER_FOLDERS),
        VerificationStep("cluster", ("make", "test-slurm"), {**WHOLE_LISTS, "FAULT_NOTICES": "20"}),
    ]
    for technique in sorted(DELETABLE_TECHNIQUES):
        step = make_step(f"without {technique}", "tests.harness.verification.changed_clone", "--technique", technique)
        steps.append(step._replace(environment=WHOLE_LISTS))
    steps += [
        make_step("stop requests", "tests.harness.runs.random_stops", "--images", "15000", "--moments", "20"),
        make_step("claims", "tests.harness.runs.claims_campaign", "--cases", "50"),
        make_step("claims on SLURM", "tests.harness.runs.claims_campaign", "--cases", "30", "--cluster"),
        make_step("lost ranks", "tests.harness.elastic.campaign", "--cases", "80", "--seed", "37"),
        make_step("lost ranks on SLURM", "tests.cluster.elastic_campaign", "--cases", "10"),
        make_step("faults of elastic jobs", "tests.cluster.faults", "--elastic"),
        make_step("planted mistakes", "tests.benchmarks.planted_mistakes", "verify"),
    ]
    return steps


def make_step(name: str, module: str, *arguments: str) -> VerificationStep:
    """Return the step that executes a module of this project."""
    return VerificationStep(name, (sys.executable, "-m", module, *arguments))


def read_commit() -> str:
    """Return the commit that is checked out. Raises UserError if tracked files have changed."""
    if read_git_output("status", "--porcelain"):
        raise UserError("make verify verifies a commit, but the checkout has changes; commit them first")
    return read_git_output("rev-parse", "HEAD").strip()


def read_git_output(*arguments: str) -> str:
    process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return process.stdout


def execute_step(step: VerificationStep, log: Path) -> tuple[int, float]:
    """Execute a step. Return its exit status and its duration in seconds. Its output goes to a log file."""
    started = time.monotonic()
    with open(log, "w") as file:
        env = os.environ | dict(step.environment)
        process = subprocess.run(step.command, cwd=ROOT, env=env, stdout=file, stderr=file, check=False)
    return process.returncode, time.monotonic() - started


def main() -> int:
    steps = list_steps()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in steps]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="repeat steps that have passed at this commit")
    arguments = parser.parse_args()

    commit = read_commit()
    RESULTS.parent.mkdir(exist_ok=True)
    results = read_json(RESULTS) if RESULTS.exists() else {}
    passed = {} if arguments.again else results.get(commit, {})
    failed = []
    for step in steps:
        if step.name not in arguments.only:
            continue
        if step.name in passed:
            print(f"{step.name}: passed before, {passed[step.name]:.0f} s", flush=True)
            continue
        log = RESULTS.with_name(f"verify-{re.sub(r'[ /]', '-', step.name)}.log")
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        status, seconds = execute_step(step, log)
        if status == 0:
            passed[step.name] = seconds
            write_json(RESULTS, {commit: passed})
        else:
            failed.append(step.name)
        verdict = "passed" if status == 0 else f"failed with exit status {status}, see {log}"
        print(f"{step.name}: {verdict}, {seconds:.0f} s", flush=True)
    print(json.dumps({"commit": commit, "passed": sorted(passed), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
