"""Lines and branches that a test suite executes, by test file, and those that another suite does not execute.

    python tests/benchmarks/suite_coverage.py record OUT.json tests/unit/config/test_config.py ...   run and save
    python tests/benchmarks/suite_coverage.py compare BEFORE.json AFTER.json                        what AFTER misses

`record` runs each test file in a pytest of its own, `--jobs` at a time, with coverage in every process that the tests
start: subprocesses, forked ranks, ranks that leave by `os._exit`, jobs on the local SLURM cluster that run a copy of
the sources. A process that is killed writes nothing. The last lines name the test files that failed or
took too long, and the exit status is 1 if there are any; what their processes executed counts all the same.

Two things start coverage in a process: the .pth file that `record` writes into this .venv's site-packages, which every
interpreter of the .venv executes wherever its sources are, and COVERAGE_PROCESS_START, which the tests' environments
hand on. So `patch` leaves out `subprocess`, which does the same with a variable of its own.

Needs `pip install "coverage>=7.10.3"`; a run of its own, not part of any test suite.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("common", "configs", "experiments", "slurm")
HOOK = "measure_suite_coverage.pth"
SETTINGS = """\
[run]
branch = True
parallel = True
data_file = {data}
disable_warnings = no-data-collected, module-not-measured, couldnt-parse, module-not-imported, already-imported
patch = fork, _exit, execv
include = {include}
omit = */site-packages/*
[paths]
project =
    {root}
    */code
    */checkout
    */project
"""


TIMED_OUT = -1  # the status of a test file that took too long


def list_sources() -> list[Path]:
    """Return the source files of the product."""
    sources: list[Path] = []
    for package in PACKAGES:
        sources += sorted((ROOT / package).rglob("*.py"))
    return sources


def collect(sources: list[Path], data: Path) -> dict[str, dict[str, Any]]:
    """Return the executed statements and branches of each source file in a combined data file."""
    import coverage

    measured = coverage.Coverage(data_file=str(data), config_file=False, branch=True)
    measured.load()
    measured_data = measured.get_data()
    files: dict[str, dict[str, Any]] = {}
    for source in sources:
        name = str(source.relative_to(ROOT))
        analysis = measured._analyze(str(source))
        choices = {line for line, count in analysis.exit_counts.items() if count > 1}
        executed = set(measured_data.arcs(str(source)) or ()) & set(analysis.arc_possibilities)
        files[name] = {
            "statements": len(analysis.statements),
            "lines": sorted(analysis.executed & analysis.statements),
            "branches": sorted([a, b] for a, b in executed if a in choices),
        }
    return files


def write_settings(folder: Path) -> Path:
    """Write the settings of coverage for one test file, and return their path."""
    patterns = []
    for base in (ROOT, "*/code", "*/checkout", "*/project"):
        patterns += [f"{base}/{package}/*" for package in PACKAGES]
    file = folder / "coverage.ini"
    file.write_text(SETTINGS.format(data=folder / "data", include=", ".join(patterns), root=ROOT))
    return file


def measure(test: str, sources: list[Path], pytest_options: list[str], seconds: float) -> dict[str, Any]:
    """Run one test file under coverage."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        settings = write_settings(Path(folder))
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", test, "-p", "no:cacheprovider", "--durations=0", *pytest_options]
        try:
            process = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"COVERAGE_PROCESS_START": str(settings)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            status = process.returncode
            text = process.stdout
        except subprocess.TimeoutExpired as timeout:
            status = TIMED_OUT
            text = str(timeout.stdout)
        combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}", "--quiet"]
        subprocess.run(combine, cwd=ROOT, capture_output=True, check=False)
        files = collect(sources, Path(folder) / "data")
    return {"seconds": time.monotonic() - start, "status": status, "output": text, "files": files}


def record(arguments: argparse.Namespace) -> int:
    """Run test files under coverage; return 1 if any failed."""
    import coverage

    sources = list_sources()
    hook = Path(coverage.__file__).parent.parent / HOOK
    hook.write_text("import coverage; coverage.process_startup()\n")
    file = Path(arguments.out)
    records: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    remaining = [test for test in arguments.tests if test not in records]
    pytest_options = arguments.pytest.split()
    try:
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            runs = {pool.submit(measure, test, sources, pytest_options, arguments.timeout): test for test in remaining}
            for run in concurrent.futures.as_completed(runs):
                test = runs[run]
                records[test] = run.result()
                file.write_text(json.dumps(records))
                last_line = (records[test]["output"].strip().splitlines() or ["no output"])[-1]
                seconds = f"{records[test]['seconds']:.0f} s"
                print(f"{len(records)}/{len(arguments.tests)}  {test}  {seconds}  {last_line}", flush=True)
    finally:
        hook.unlink()
    print_totals(merge(records))
    failed = [test for test in arguments.tests if records[test]["status"]]
    for test in failed:
        status = records[test]["status"]
        print(f"{'took too long' if status == TIMED_OUT else f'failed with status {status}'}: {test}")
    return 1 if failed else 0


Merged = dict[str, dict[str, set[Any]]]


def merge(records: dict[str, Any]) -> Merged:
    """Return the union over all test files."""
    merged: Merged = {}
    for run in records.values():
        for name, file in run["files"].items():
            union = merged.setdefault(name, {"lines": set(), "branches": set()})
            union["lines"] |= set(file["lines"])
            union["branches"] |= set(map(tuple, file["branches"]))
    return merged


def print_totals(merged: Merged) -> None:
    lines = sum(len(file["lines"]) for file in merged.values())
    branches = sum(len(file["branches"]) for file in merged.values())
    print(f"{lines} lines and {branches} branches of {len(merged)} files executed")


def find_origins(name: str, revision: str) -> dict[int, tuple[str, int]]:
    """Return the file and line of a revision from which each line of a present file comes; new lines are left out."""
    command = ["git", "blame", "--incremental", "-M", "-C", f"^{revision}", "--", name]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # fails if untracked
    origins: dict[int, tuple[str, int]] = {}
    old_commits: set[str] = set()
    commit = ""
    old = 0
    new = 0
    count = 0
    for line in process.stdout.splitlines():
        if match := re.fullmatch(r"([0-9a-f]{40}) (\d+) (\d+) (\d+)", line):
            commit = match[1]
            old, new, count = map(int, match.groups()[1:])
        elif line == "boundary":
            old_commits.add(commit)
        elif line.startswith("filename ") and commit in old_commits:
            old_name = line.removeprefix("filename ")
            for i in range(count):
                origins[new + i] = (old_name, old + i)
    return origins


def follow_lines(merged: Merged, revision: str) -> Merged:
    """Return what was executed of the sources of a revision, by the names and line numbers of the present sources.

    Lines are followed into other files. Deleted and changed lines are left out, and so are branches that the present
    sources do not have.
    """
    from coverage.parser import PythonParser

    lines = set()
    branches = set()
    for name, file in merged.items():
        lines |= {(name, line) for line in file["lines"]}
        branches |= {((name, a), (name, b)) for a, b in file["branches"]}

    followed: Merged = {}
    for path in list_sources():
        name = str(path.relative_to(ROOT))
        origins = find_origins(name, revision)
        for line, (old_name, number) in list(origins.items()):
            origins[-line] = (old_name, -number)  # branches to a negative line leave a function
        parser = PythonParser(filename=str(path))
        parser.parse_source()
        choices = {line for line, count in parser.exit_counts().items() if count > 1}
        arcs = [(a, b) for a, b in parser.arcs() if a in choices]
        followed[name] = {
            "lines": {line for line in parser.statements if origins.get(line) in lines},
            "branches": {(a, b) for a, b in arcs if (origins.get(a), origins.get(b)) in branches},
        }
    return followed


def compare(arguments: argparse.Namespace) -> int:
    """List what the first suite executes and the second does not; return 1 if there is anything."""
    before = merge(json.loads(Path(arguments.before).read_text()))
    if arguments.revision:
        before = follow_lines(before, arguments.revision)
    after: Merged = {}
    for path in arguments.after:
        for name, file in merge(json.loads(Path(path).read_text())).items():
            union = after.setdefault(name, {"lines": set(), "branches": set()})
            union["lines"] |= file["lines"]
            union["branches"] |= file["branches"]
    print_totals(before)
    print_totals(after)
    total = 0
    missing = 0
    for name, file in sorted(before.items()):
        executed = after.get(name, {"lines": set(), "branches": set()})
        lines = sorted(file["lines"] - executed["lines"])
        branches = sorted(file["branches"] - executed["branches"])
        total += len(file["lines"]) + len(file["branches"])
        missing += len(lines) + len(branches)
        if lines or branches:
            line_text = ", ".join(map(str, lines)) or "none"
            branch_text = ", ".join(f"{a}->{b}" for a, b in branches) or "none"
            print(f"{name}: lines {line_text}; branches {branch_text}")
    print(f"{1 - missing / total:.2%} of {total} lines and branches; {missing} missing")
    return int(missing > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    recorder = verbs.add_parser("record", help="run test files under coverage")
    recorder.add_argument("out", help="the JSON to write; files that it holds already are not run again")
    recorder.add_argument("tests", nargs="+", help="test files")
    recorder.add_argument("--jobs", type=int, default=2, help="test files at a time")
    recorder.add_argument("--timeout", type=float, default=3600, help="seconds for one test file")
    recorder.add_argument("--pytest", default="", help="more options of pytest")
    recorder.set_defaults(run=record)
    comparer = verbs.add_parser("compare", help="lines and branches that one suite executes and others together do not")
    comparer.add_argument("before")
    comparer.add_argument("after", nargs="+")
    comparer.add_argument("--revision", help="the commit whose sources BEFORE executed, if the present ones differ")
    comparer.set_defaults(run=compare)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
