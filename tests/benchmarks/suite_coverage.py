"""Lines and branches that a test suite executes, by test file; and what one suite executes that another does not.

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
LATE = -1  # the status of a test file that took too long
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


def collect(sources: list[Path], data: Path) -> dict[str, dict[str, Any]]:
    """Executed statements and branches of each source file in a combined data file."""
    import coverage

    measured = coverage.Coverage(data_file=str(data), config_file=False, branch=True)
    measured.load()
    known = measured.get_data()
    files: dict[str, dict[str, Any]] = {}
    for source in sources:
        name = str(source.relative_to(ROOT))
        analysis = measured._analyze(str(source))
        possible = {a for a, count in analysis.exit_counts.items() if count > 1}
        taken = set(known.arcs(str(source)) or ()) & set(analysis.arc_possibilities)
        files[name] = {
            "statements": len(analysis.statements),
            "lines": sorted(analysis.executed & analysis.statements),
            "branches": sorted([a, b] for a, b in taken if a in possible),
        }
    return files


def measure(test: str, sources: list[Path], words: list[str], seconds: float) -> dict[str, Any]:
    """Run one test file under coverage."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        settings = Path(folder) / "coverage.ini"
        patterns = [
            f"{base}/{package}/*" for base in (ROOT, "*/code", "*/checkout", "*/project") for package in PACKAGES
        ]
        text = SETTINGS.format(data=Path(folder) / "data", include=", ".join(patterns), root=ROOT)
        settings.write_text(text)
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", test, "-p", "no:cacheprovider", "--durations=0", *words]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"COVERAGE_PROCESS_START": str(settings)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            status, output = LATE, str(late.stdout)
        combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}", "--quiet"]
        subprocess.run(combine, cwd=ROOT, capture_output=True, check=False)
        files = collect(sources, Path(folder) / "data")
    return {"seconds": time.monotonic() - began, "status": status, "output": output, "files": files}


def record(given: argparse.Namespace) -> int:
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    import coverage

    hook = Path(coverage.__file__).parent.parent / HOOK
    hook.write_text("import coverage; coverage.process_startup()\n")
    out = Path(given.out)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    left = [test for test in given.tests if test not in found]
    try:
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            runs = {pool.submit(measure, test, sources, given.pytest.split(), given.timeout): test for test in left}
            for run in concurrent.futures.as_completed(runs):
                test = runs[run]
                found[test] = run.result()
                out.write_text(json.dumps(found))
                last = (found[test]["output"].strip().splitlines() or ["no output"])[-1]
                print(f"{len(found)}/{len(given.tests)}  {test}  {found[test]['seconds']:.0f} s  {last}", flush=True)
    finally:
        hook.unlink()
    print_totals(merge(found))
    failed = {test: found[test]["status"] for test in given.tests if found[test]["status"]}
    for test, status in failed.items():
        print(f"{'took too long' if status == LATE else f'failed with status {status}'}: {test}")
    return int(bool(failed))


Merged = dict[str, dict[str, set[Any]]]


def merge(found: dict[str, Any]) -> Merged:
    """The union over all test files."""
    merged: Merged = {}
    for run in found.values():
        for name, file in run["files"].items():
            into = merged.setdefault(name, {"lines": set(), "branches": set()})
            into["lines"] |= set(file["lines"])
            into["branches"] |= {tuple(pair) for pair in file["branches"]}
    return merged


def print_totals(merged: Merged) -> None:
    lines, branches = (sum(len(file[kind]) for file in merged.values()) for kind in ("lines", "branches"))
    print(f"{lines} lines and {branches} branches of {len(merged)} files executed")


def find_origins(name: str, revision: str) -> dict[int, tuple[str, int]]:
    """The file and line of a revision from which each line of a file of today comes; others are left out."""
    words = ["git", "blame", "--incremental", "-M", "-C", f"^{revision}", "--", name]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)  # an untracked file has none
    found: dict[int, tuple[str, int]] = {}
    commit, old, new, count, kept = "", 0, 0, 0, set[str]()
    for line in shown.stdout.splitlines():
        if match := re.fullmatch(r"([0-9a-f]{40}) (\d+) (\d+) (\d+)", line):
            commit, old, new, count = match[1], int(match[2]), int(match[3]), int(match[4])
        elif line == "boundary":
            kept.add(commit)
        elif line.startswith("filename ") and commit in kept:
            found |= {new + i: (line.removeprefix("filename "), old + i) for i in range(count)}
    return found


def follow_lines(merged: Merged, revision: str) -> Merged:
    """What was executed of the sources of a revision, by the names and line numbers that today's sources have.

    Lines are followed into other files. Those that are no more, or that were changed, are left out, and so are
    branches that today's sources do not have.
    """
    from coverage.parser import PythonParser

    lines = {(name, line) for name, file in merged.items() for line in file["lines"]}
    branches = {((name, a), (name, b)) for name, file in merged.items() for a, b in file["branches"]}
    followed: Merged = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        then = find_origins(name, revision)
        then |= {-line: (before, -number) for line, (before, number) in then.items()}  # these leave a function
        parser = PythonParser(filename=str(path))
        parser.parse_source()
        choices = {line for line, count in parser.exit_counts().items() if count > 1}
        followed[name] = {
            "lines": {line for line in parser.statements if then.get(line) in lines},
            "branches": {(a, b) for a, b in parser.arcs() if a in choices and (then.get(a), then.get(b)) in branches},
        }
    return followed


def compare(given: argparse.Namespace) -> int:
    """List what the first suite executes and the second does not; exit status 1 if there is anything."""
    before = merge(json.loads(Path(given.before).read_text()))
    if given.revision:
        before = follow_lines(before, given.revision)
    after: Merged = {}
    for path in given.after:
        for name, file in merge(json.loads(Path(path).read_text())).items():
            into = after.setdefault(name, {"lines": set(), "branches": set()})
            into["lines"] |= file["lines"]
            into["branches"] |= file["branches"]
    print_totals(before)
    print_totals(after)
    total = missing = 0
    for name, file in sorted(before.items()):
        have = after.get(name, {"lines": set(), "branches": set()})
        lines, branches = sorted(file["lines"] - have["lines"]), sorted(file["branches"] - have["branches"])
        total += len(file["lines"]) + len(file["branches"])
        missing += len(lines) + len(branches)
        if lines or branches:
            told = ", ".join(map(str, lines)), ", ".join(f"{a}->{b}" for a, b in branches)
            print(f"{name}: lines {told[0] or 'none'}; branches {told[1] or 'none'}")
    print(f"{1 - missing / total:.2%} of {total} lines and branches; {missing} missing")
    return int(missing > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("record", help="run test files under coverage")
    one.add_argument("out", help="the JSON to write; files that it holds already are not run again")
    one.add_argument("tests", nargs="+", help="test files")
    one.add_argument("--jobs", type=int, default=2, help="test files at a time")
    one.add_argument("--timeout", type=float, default=3600, help="seconds for one test file")
    one.add_argument("--pytest", default="", help="more words for pytest")
    one.set_defaults(run=record)
    two = verbs.add_parser("compare", help="what one suite executes and others together do not")
    two.add_argument("before")
    two.add_argument("after", nargs="+")
    two.add_argument("--revision", help="the commit whose sources BEFORE executed, if today's differ")
    two.set_defaults(run=compare)
    given = parser.parse_args()
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main())
