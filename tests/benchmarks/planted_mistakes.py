"""Plant mistakes in the product code, one at a time, and record which of them the tests notice.

    python -m tests.benchmarks.planted_mistakes list
    python -m tests.benchmarks.planted_mistakes verify                               whether their tests notice them
    python -m tests.benchmarks.planted_mistakes run --coverage COVERAGE.json --out RESULT.json
    python -m tests.benchmarks.planted_mistakes summary BEFORE.json [AFTER.json]     and what AFTER misses

`verify` plants each mistake in a copy of the checkout, where it runs the test that the mistake names (`caught_by`).
The test must fail there, and pass in a copy without mistakes. A hang does not count.

`run` looks for a test that notices a mistake: it runs the test files that executed the changed lines according to
suite_coverage.py, the quickest first, up to the first that fails. A hang counts, and a failure that no copy without the
mistake has. A mistake that is in --out already is not tried again. --list FILE.json, for `list` and `run`, reads other
mistakes, for example those of random_mistakes.py: a list of objects with name, file, old and new. Use `run` on a
machine without other load: a test that is too slow under load looks like a caught mistake.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import planted_mistakes_list  # noqa: E402
from tests.benchmarks.planted_mistakes_list import Mistake  # noqa: E402
from tests.harness.experiments.discovery import import_experiment_modules  # noqa: E402


def list_all_mistakes() -> list[Mistake]:
    """Return the mistakes of the shared list and of all experiments."""
    mistakes = list(planted_mistakes_list.MISTAKES)
    for module in import_experiment_modules("tests.benchmarks.{}_mistakes").values():
        mistakes += module.MISTAKES
    return mistakes


MISTAKES = list_all_mistakes()
GIT = ["git", "-c", "user.name=planted", "-c", "user.email=planted@localhost", "-c", "commit.gpgsign=false"]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
ERROR_LINE = re.compile(r"^E +(.*)$", re.MULTILINE)  # the summary leaves the error out where the line is full
TIMEOUT_MESSAGE = re.compile(r"Timeout \(?>")  # of pytest-timeout
RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPED = threading.Event()


@dataclass(frozen=True)
class Covering:
    """A test file that executes a mistake's lines."""

    test: str
    seconds: float
    sound: bool
    """Whether it passed while it was recorded."""

    @property
    def priority(self) -> tuple[bool, int, bool]:
        """The key by which test files are sorted: those that passed, and of these the quickest, come first."""
        return not self.sound, round(self.seconds), not self.test.startswith("tests/unit/")


@dataclass
class Outcome:
    """The outcome of pytest."""

    failed: bool
    hang: bool = False
    tests: list[str] = field(default_factory=list)
    """The ids of failed tests; empty if pytest crashed or was killed."""
    reason: str = ""

    @property
    def has_failed_test(self) -> bool:
        """Whether a test has failed. A busy machine may cause a hang, and a wrong test id an error of pytest."""
        return self.failed and not self.hang and bool(self.tests)

    @property
    def has_passed_test(self) -> bool:
        """Whether tests were run, and all of them passed."""
        return not self.failed and not self.reason


# ---- planting


def problem_of(mistake: Mistake) -> str:
    """Return why a mistake cannot be planted; empty if it can."""
    if not (ROOT / mistake.file).is_file():
        return f"{mistake.file} does not exist"
    text = (ROOT / mistake.file).read_text()
    count = text.count(mistake.old)
    if count != 1:
        return f"the old text occurs {count} times in {mistake.file}"
    if mistake.old == mistake.new:
        return "old and new text are the same"
    try:
        compile(text.replace(mistake.old, mistake.new), mistake.file, "exec")
    except SyntaxError as error:
        return f"{mistake.file} does not compile with the mistake: {error}"
    return ""


def list_problems(mistakes: Sequence[Mistake]) -> list[str]:
    """Return the mistakes that cannot be planted, and the names that several mistakes have."""
    problems = []
    for mistake in mistakes:
        if problem := problem_of(mistake):
            problems.append(f"{mistake.name}: {problem}")
    names = collections.Counter(mistake.name for mistake in mistakes)
    problems += [f"{name}: {count} mistakes have this name" for name, count in names.items() if count > 1]
    return problems


def find_last_line(statement: ast.stmt) -> int:
    """Return the last line of a statement; of a compound statement only of its head."""
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if not body:
        return statement.end_lineno or statement.lineno
    first = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
    return max(statement.lineno, first.lineno - 1)


def changed_statements(mistake: Mistake) -> set[int]:
    """Return the first lines of the statements that contain the old text; coverage knows no other lines."""
    text = (ROOT / mistake.file).read_text()
    start = text.index(mistake.old)
    first = text.count("\n", 0, start) + 1
    last = first + mistake.old.rstrip("\n").count("\n")
    lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= last and find_last_line(node) >= first:
            lines.add(node.lineno)
    return lines


def covering(mistake: Mistake, recorded: dict[str, Any]) -> list[Covering]:
    """Return the test files that execute the changed lines, in the order in which they are tried."""
    lines = changed_statements(mistake)
    files = []
    for test, run in recorded.items():
        executed = run["files"].get(mistake.file, {}).get("lines", ())
        if lines & set(executed):
            files.append(Covering(test, run["seconds"], run["status"] == 0))
    return sorted(files, key=lambda file: file.priority)


def copy_checkout(target: Path, mistake: Mistake | None) -> None:
    """Copy the checkout's files, as a repository of its own: the program asks git for its source."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, process.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    if mistake:
        file = target / mistake.file
        file.write_text(file.read_text().replace(mistake.old, mistake.new))
    (target / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run([*GIT, "init", "-q"], cwd=target, check=True)
    (target / ".git" / "info").mkdir(exist_ok=True)
    (target / ".git" / "info" / "exclude").write_text("/.venv\n")  # .gitignore means a folder, not a link
    subprocess.run([*GIT, "add", "-A"], cwd=target, check=True)
    subprocess.run([*GIT, "commit", "-q", "-m", "copy"], cwd=target, check=True)


# ---- running


def execute(command: list[str], place: Path, seconds: float) -> tuple[int | None, str]:
    """Run a command; return its exit status, None if it took too long, and its output."""
    environ = os.environ | {"PYTHONPATH": str(place)}  # precedes an editable install
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=place, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        RUNNING.add(process)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            end(process)
        finally:
            RUNNING.discard(process)
        log.seek(0)
        return status, log.read().decode(errors="replace")


def run_pytest(place: Path, tests: Sequence[str], seconds: float, workers: int = 0) -> Outcome:
    """Run tests in a copy up to the first failure, at most so many seconds."""
    if STOPPED.is_set():
        raise RuntimeError("stopped")
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-ra", "-p", "no:cacheprovider"]
    if workers:
        command += ["--numprocesses", str(workers)]
    status, text = execute(command, place, seconds)
    if status is None:
        return Outcome(failed=True, hang=True, reason=f"killed after {seconds:.0f} s")
    if status == 0:
        return Outcome(failed=False)
    if status == 5:
        return Outcome(failed=False, reason="no test was run")
    error_line = ERROR_LINE.search(text)
    reason = error_line[1] if error_line else f"exit status {status}: {' '.join(text.split())[-200:]}"
    is_hang = bool(TIMEOUT_MESSAGE.search(text))
    return Outcome(failed=True, hang=is_hang, tests=FAILED.findall(text), reason=reason)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a pytest and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_in_copy(mistake: Mistake | None, tests: Sequence[str], seconds: float, workers: int = 0) -> Outcome:
    """Run tests in a new copy, with a mistake or without any."""
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        copy_checkout(Path(folder), mistake)
        return run_pytest(Path(folder), tests, seconds, workers)


def try_mistake(mistake: Mistake, recorded: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Plant one mistake and look for a test that notices it."""
    start = time.monotonic()
    candidates = covering(mistake, recorded)
    files_run = 0
    result: dict[str, Any] = {"file": mistake.file, "caught": False, "by": None, "tests": [], "hang": False}
    unsure: list[str] = []  # failed, but perhaps not because of the mistake
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        copy_checkout(Path(folder), mistake)
        for candidate in candidates:
            files_run += 1
            seconds = max(timeout, 3 * candidate.seconds)
            outcome = run_pytest(Path(folder), [candidate.test], seconds)
            if not outcome.failed:
                continue
            failed_tests = outcome.tests or [candidate.test]
            if not candidate.sound or (not outcome.hang and run_in_copy(None, failed_tests, seconds).failed):
                unsure.append(candidate.test)
                continue
            result |= {"caught": True, "by": candidate.test, "tests": outcome.tests}
            result |= {"hang": outcome.hang, "why": outcome.reason}
            break
    covered_by = [candidate.test for candidate in candidates]
    result |= {"unsure": unsure, "covered_by": covered_by, "files_run": files_run}
    return result | {"seconds": time.monotonic() - start}


# ---- commands


def read_mistakes(arguments: argparse.Namespace) -> list[Mistake]:
    """Return the mistakes of --list, or those of this project."""
    if not arguments.list:
        return MISTAKES
    entries = json.loads(Path(arguments.list).read_text())
    return [Mistake(entry["name"], entry["file"], entry["old"], entry["new"], caught_by="") for entry in entries]


def list_mistakes(arguments: argparse.Namespace) -> int:
    for mistake in read_mistakes(arguments):
        print(f"{mistake.name:<32}{mistake.file}")
    return 0


def read_results(paths: Sequence[str]) -> dict[str, Any]:
    """Return the union of JSON files that hold mappings."""
    union: dict[str, Any] = {}
    for path in paths:
        union |= json.loads(Path(path).read_text())
    return union


def select_mistakes(mistakes: Sequence[Mistake], names: Sequence[str]) -> list[Mistake]:
    """Return the mistakes with these names, or all. Exits if a name is unknown or a mistake cannot be planted."""
    unknown = set(names) - {mistake.name for mistake in mistakes}
    if unknown:
        names_text = ", ".join(sorted(unknown))
        sys.exit(f"unknown mistakes: {names_text}; to list them: python -m tests.benchmarks.planted_mistakes list")
    problems = list_problems(mistakes)
    if problems:
        sys.exit("\n".join(problems))
    return [mistake for mistake in mistakes if not names or mistake.name in names]


@contextlib.contextmanager
def open_pool(jobs: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Provide threads in the `with` block. Tests that still run at its end, after an error or Ctrl-C, are killed."""
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        STOPPED.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):
            end(process)


def run_mistakes(arguments: argparse.Namespace) -> int:
    mistakes = select_mistakes(read_mistakes(arguments), arguments.only)
    recorded = read_results(arguments.coverage)
    file = Path(arguments.out)
    results = read_results([arguments.out]) if file.exists() else {}
    remaining = [mistake for mistake in mistakes if mistake.name not in results]
    with open_pool(arguments.jobs) as pool:
        runs = {pool.submit(try_mistake, mistake, recorded, arguments.timeout): mistake.name for mistake in remaining}
        for run in concurrent.futures.as_completed(runs):
            name = runs[run]
            result = run.result()
            results[name] = result
            new_file = file.with_name(f".{file.name}.new")
            new_file.write_text(json.dumps(results, indent=1))
            new_file.replace(file)
            print(f"{len(results):>3}  {result['seconds']:>6.0f} s  {name:<32}{describe_result(result)}", flush=True)
    return 0


def check_tests_without_mistakes(tests: Sequence[str], arguments: argparse.Namespace) -> bool:
    """Print and return whether tests pass in a copy without mistakes. Tests that always fail notice nothing."""
    start = time.monotonic()
    outcome = run_in_copy(None, tests, arguments.timeout * len(tests), workers=arguments.jobs)
    if outcome.has_passed_test:
        print(f"{time.monotonic() - start:>6.1f} s  {len(tests)} tests passed without mistakes", flush=True)
    else:
        print(f"failed without mistakes: {' '.join(outcome.tests) or 'pytest'}: {outcome.reason}")
    return outcome.has_passed_test


def verify_mistake(mistake: Mistake, timeout: float) -> tuple[Outcome, float]:
    """Run the test of a mistake in a copy with the mistake. Return the outcome and the duration in seconds."""
    start = time.monotonic()
    outcome = run_in_copy(mistake, [mistake.caught_by], timeout)
    return outcome, time.monotonic() - start


def verify_mistakes(arguments: argparse.Namespace) -> int:
    """Print whether the test of each mistake notices it. Return 1 if a test does not."""
    mistakes = select_mistakes(MISTAKES, arguments.only)
    tests = sorted({mistake.caught_by for mistake in mistakes})
    unnoticed = []
    with open_pool(arguments.jobs) as pool:
        if not pool.submit(check_tests_without_mistakes, tests, arguments).result():
            return 1
        runs = {pool.submit(verify_mistake, mistake, arguments.timeout): mistake for mistake in mistakes}
        for run in concurrent.futures.as_completed(runs):
            mistake = runs[run]
            outcome, seconds = run.result()
            if outcome.has_failed_test:
                verdict = f"noticed by {outcome.tests[0]}: {outcome.reason}"
            else:
                verdict = f"NOT NOTICED by {mistake.caught_by}: {outcome.reason or 'passed'}"
                unnoticed.append(mistake.name)
            print(f"{seconds:>6.1f} s  {mistake.name:<32}{verdict}", flush=True)
    if unnoticed:
        print(f"{len(unnoticed)} of {len(mistakes)} mistakes were not noticed: {' '.join(sorted(unnoticed))}")
        return 1
    print(f"all {len(mistakes)} mistakes were noticed")
    return 0


def describe_result(result: dict[str, Any] | None) -> str:
    """Describe which test caught a mistake, or that none did."""
    if result is None:
        return "not tried"
    if result["caught"]:
        test = (result["tests"] or [result["by"]])[0]
        return f"{test} (hang)" if result["hang"] else test
    return f"unsure: {', '.join(result['unsure'])}" if result["unsure"] else "NOT CAUGHT"


def tier(result: dict[str, Any] | None) -> str:
    """Return the folder under tests/ in which the mistake was caught."""
    parts = Path(result["by"]).parts if result and result["by"] else ()
    return parts[1] if len(parts) > 2 else "-"


def print_counts(suite: dict[str, Any]) -> None:
    """Print how many mistakes a suite caught."""
    caught = [result for result in suite.values() if result["caught"]]
    hung = sum(result["hang"] for result in caught)
    unsure = [result for result in suite.values() if result["unsure"] and not result["caught"]]
    print(f"  {len(caught)} of {len(suite)} caught, {hung} of them by a hang; {len(unsure)} unsure")


def print_missed(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Print the mistakes that only the first suite caught."""
    caught = {name for name, result in second.items() if result["caught"]}
    missed = [name for name, result in first.items() if result["caught"] and name not in caught]
    print(f"caught by the first and not by the second: {len(missed)}")
    for name in missed:
        print(f"  {name:<32}{first[name]['by']}; second: {describe_result(second.get(name))}")


def print_summary(arguments: argparse.Namespace) -> int:
    suites = [read_results([path]) for path in arguments.results]
    names = [mistake.name for mistake in MISTAKES]
    tried: dict[str, None] = {}
    for suite in suites:
        tried |= dict.fromkeys(suite)
    if not set(tried) <= set(names):  # mistakes of a --list
        names = list(tried)
    for path, suite in zip(arguments.results, suites, strict=True):
        print(path)
        for name in names:
            result = suite.get(name)
            print(f"  {name:<32}{tier(result):<13}{describe_result(result)}")
        print_counts(suite)
    if len(suites) == 2:
        print_missed(*suites)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    list_option = argparse.ArgumentParser(add_help=False)
    list_option.add_argument("--list", metavar="FILE.json", help="other mistakes than those of this project")
    run_options = argparse.ArgumentParser(add_help=False)
    run_options.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mistakes alone")
    run_options.add_argument("--jobs", type=int, default=2, help="mistakes at a time")
    timeout_help = "seconds for a test, with `run` at least three times its recorded time"
    run_options.add_argument("--timeout", type=float, default=900, help=timeout_help)

    lister = verbs.add_parser("list", help="names and files", parents=[list_option])
    lister.set_defaults(run=list_mistakes)

    verifier = verbs.add_parser("verify", help="plant them and run their tests", parents=[run_options])
    verifier.set_defaults(run=verify_mistakes)

    runner = verbs.add_parser("run", help="plant them and look for tests", parents=[list_option, run_options])
    runner.add_argument("--coverage", nargs="+", required=True, help="JSON files that suite_coverage.py recorded")
    runner.add_argument("--out", required=True, help="the JSON to write")
    runner.set_defaults(run=run_mistakes)

    summary = verbs.add_parser("summary", help="a table, and with two results what the second misses")
    summary.add_argument("results", nargs="+")
    summary.set_defaults(run=print_summary)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
