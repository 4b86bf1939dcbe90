"""Which of forty mistakes a test suite notices when they are planted in the product code one at a time.

    python tests/benchmarks/planted_mistakes.py list
    python tests/benchmarks/planted_mistakes.py check                                  whether all can be planted
    python tests/benchmarks/planted_mistakes.py run --coverage COVERAGE.json --out RESULT.json
    python tests/benchmarks/planted_mistakes.py summary BEFORE.json [AFTER.json]       and what AFTER misses

`run` plants each mistake in a copy of the checkout, where it runs the test files that executed the changed lines
according to suite_coverage.py, the quickest first, up to the first that fails. A hang counts, and a failure that no
copy without the mistake has. --list FILE.json, for `list`, `check` and `run`, takes other mistakes: a list of objects
with name, file, old, new, and why if you like. A mistake that --out holds already is not tried again. Run it with
nothing else to do: a test that is too slow under load looks like a caught mistake.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks import planted_mistakes_list  # noqa: E402
from tests.benchmarks.planted_mistakes_list import Mistake  # noqa: E402
from tests.harness.declared import import_of_experiments  # noqa: E402

OF_EXPERIMENTS = import_of_experiments("tests.benchmarks.{}_mistakes").values()
MISTAKES: list[Mistake] = [
    *planted_mistakes_list.MISTAKES,
    *(mistake for module in OF_EXPERIMENTS for mistake in module.MISTAKES),
]
GIT = ["git", "-c", "user.name=planted", "-c", "user.email=planted@localhost", "-c", "commit.gpgsign=false"]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
SAID = re.compile(r"^E +(.*)$", re.MULTILINE)  # the summary leaves the error out where the line is full
LATE = re.compile(r"Timeout \(?>")  # as pytest-timeout says it
RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPED = threading.Event()


@dataclass(frozen=True)
class Covering:
    """A test file that executes a mistake's lines."""

    test: str
    seconds: float
    sound: bool
    """Whether it passed while it was recorded."""


@dataclass
class Outcome:
    """How pytest ended."""

    failed: bool
    hang: bool = False
    tests: list[str] = field(default_factory=list)
    """The ids of what failed; none where it crashed or was ended."""
    why: str = ""


# ---- planting


def problem_of(mistake: Mistake) -> str:
    """Why a mistake cannot be planted; empty if it can."""
    if not (ROOT / mistake.file).is_file():
        return f"there is no {mistake.file} any more"
    text = (ROOT / mistake.file).read_text()
    count = text.count(mistake.old)
    if count != 1:
        return f"the old text occurs {count} times in {mistake.file}"
    if mistake.old == mistake.new:
        return "old and new text are the same"
    try:
        compile(text.replace(mistake.old, mistake.new), mistake.file, "exec")
    except SyntaxError as error:
        return f"{mistake.file} does not compile any more: {error}"
    return ""


def changed_statements(mistake: Mistake) -> set[int]:
    """The lines in which the statements begin that the old text is a part of; coverage knows no other lines."""
    text = (ROOT / mistake.file).read_text()
    start = text.index(mistake.old)
    first = text.count("\n", 0, start) + 1
    last = first + mistake.old.rstrip("\n").count("\n")
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            end = node.end_lineno or node.lineno
            if body:  # of a compound statement only the head
                inside = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
                end = max(node.lineno, inside.lineno - 1)
            if node.lineno <= last and end >= first:
                found.add(node.lineno)
    return found


def covering(mistake: Mistake, recorded: dict[str, Any]) -> list[Covering]:
    """The test files that execute what is changed, in the order in which they are tried."""
    lines = changed_statements(mistake)
    found = [
        Covering(test, run["seconds"], run["status"] == 0)
        for test, run in recorded.items()
        if lines & set(run["files"].get(mistake.file, {}).get("lines", ()))
    ]
    return sorted(found, key=lambda one: (not one.sound, round(one.seconds), not one.test.startswith("tests/unit/")))


def copy_checkout(target: Path, mistake: Mistake | None) -> None:
    """Copy the checkout's files, as a repository of its own: the program asks git for its source."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
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


def run_pytest(place: Path, tests: list[str], seconds: float) -> Outcome:
    """Run tests in a copy up to the first failure, at most so many seconds."""
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-ra", "-p", "no:cacheprovider"]
    environ = os.environ | {"PYTHONPATH": str(place)}  # goes before an editable install
    if STOPPED.is_set():
        raise RuntimeError("stopped")
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
        output = log.read().decode(errors="replace")
    if status is None:
        return Outcome(failed=True, hang=True, why=f"ended after {seconds:.0f} s")
    if status in (0, 5):  # 5: no test was chosen
        return Outcome(failed=False)
    said = SAID.search(output)
    why = said[1] if said else f"exit status {status}: {output.strip()[-200:]}"
    return Outcome(True, bool(LATE.search(output)), FAILED.findall(output), why)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a pytest and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def fails_without(tests: list[str], seconds: float) -> bool:
    """Whether tests fail without any mistake, too."""
    with tempfile.TemporaryDirectory(prefix="sound-") as folder:
        copy_checkout(Path(folder), None)
        return run_pytest(Path(folder), tests, seconds).failed


def try_mistake(mistake: Mistake, recorded: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Plant one mistake and look for a test that notices it."""
    began, chosen, tried = time.monotonic(), covering(mistake, recorded), 0
    result: dict[str, Any] = {"file": mistake.file, "caught": False, "by": None, "tests": [], "hang": False}
    unsure: list[str] = []  # failed, but perhaps not because of the mistake
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        copy_checkout(Path(folder), mistake)
        for one in chosen:
            tried += 1
            seconds = max(timeout, 3 * one.seconds)
            outcome = run_pytest(Path(folder), [one.test], seconds)
            if not outcome.failed:
                continue
            if not one.sound or (not outcome.hang and fails_without(outcome.tests or [one.test], seconds)):
                unsure.append(one.test)
                continue
            result |= {"caught": True, "by": one.test, "tests": outcome.tests}
            result |= {"hang": outcome.hang, "why": outcome.why}
            break
    result |= {"unsure": unsure, "covered_by": [one.test for one in chosen], "files_run": tried}
    return result | {"seconds": time.monotonic() - began}


# ---- commands


def read_mistakes(given: argparse.Namespace) -> list[Mistake]:
    """The mistakes of --list, or the forty."""
    if not given.list:
        return MISTAKES
    return [
        Mistake(one["name"], one["file"], one["old"], one["new"]) for one in json.loads(Path(given.list).read_text())
    ]


def list_mistakes(given: argparse.Namespace) -> int:
    for mistake in read_mistakes(given):
        print(f"{mistake.name:<32}{mistake.file}")
    return 0


def check_mistakes(given: argparse.Namespace) -> int:
    """Say which mistakes cannot be planted; exit status 1 if there are any."""
    mistakes = read_mistakes(given)
    problems = [f"{mistake.name}: {problem}" for mistake in mistakes if (problem := problem_of(mistake))]
    names = collections.Counter(mistake.name for mistake in mistakes)
    problems += [f"{name}: {count} mistakes have this name" for name, count in names.items() if count > 1]
    print("\n".join(problems) or f"all {len(mistakes)} mistakes can be planted")
    return int(bool(problems))


def run_mistakes(given: argparse.Namespace) -> int:
    if check_mistakes(given):
        return 1
    mistakes = read_mistakes(given)
    unknown = set(given.only) - {mistake.name for mistake in mistakes}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    recorded: dict[str, Any] = {}
    for path in given.coverage:
        recorded |= json.loads(Path(path).read_text())
    out = Path(given.out)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    left = [one for one in mistakes if one.name not in found and one.name in (given.only or [one.name])]
    pool = concurrent.futures.ThreadPoolExecutor(given.jobs)
    try:
        runs = {pool.submit(try_mistake, one, recorded, given.timeout): one for one in left}
        for run in concurrent.futures.as_completed(runs):
            name = runs[run].name
            found[name] = run.result()
            beside = out.with_name(f".{out.name}.new")
            beside.write_text(json.dumps(found, indent=1))
            beside.replace(out)
            print(f"{len(found):>3}  {found[name]['seconds']:>6.0f} s  {name:<32}{told(found[name])}", flush=True)
    finally:
        STOPPED.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):  # only after Ctrl-C or a failure of this program
            end(process)
    return 0


def told(result: dict[str, Any] | None) -> str:
    """What became of a mistake, in words."""
    if result is None:
        return "not tried"
    if result["caught"]:
        return f"{(result['tests'] or [result['by']])[0]}{' (hang)' if result['hang'] else ''}"
    return f"unsure: {', '.join(result['unsure'])}" if result["unsure"] else "NOT CAUGHT"


def tier(result: dict[str, Any] | None) -> str:
    """The folder under tests/ in which the mistake was caught."""
    parts = Path(result["by"]).parts if result and result["by"] else ()
    return parts[1] if len(parts) > 2 else "-"


def print_summary(given: argparse.Namespace) -> int:
    suites = [json.loads(Path(path).read_text()) for path in given.results]
    names = [mistake.name for mistake in MISTAKES]
    if not set().union(*suites) <= set(names):  # mistakes of a --list
        names = list(dict.fromkeys(name for suite in suites for name in suite))
    for path, suite in zip(given.results, suites, strict=True):
        print(path)
        for name in names:
            found = suite.get(name)
            print(f"  {name:<32}{tier(found):<13}{told(found)}")
        caught = [found for found in suite.values() if found["caught"]]
        hung, unsure = (
            sum(f["hang"] for f in caught),
            sum(bool(f["unsure"]) and not f["caught"] for f in suite.values()),
        )
        print(f"  {len(caught)} of {len(suite)} caught, {hung} of them by a hang; {unsure} unsure")
    if len(suites) == 2:
        second = {name for name, found in suites[1].items() if found["caught"]}
        missed = [name for name, found in suites[0].items() if found["caught"] and name not in second]
        print(f"caught by the first and not by the second: {len(missed)}")
        for name in missed:
            print(f"  {name:<32}{suites[0][name]['by']}; second: {told(suites[1].get(name))}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--list", metavar="FILE.json", help="other mistakes than the forty")
    verbs.add_parser("list", help="names and files", parents=[chosen]).set_defaults(run=list_mistakes)
    verbs.add_parser("check", help="whether all can be planted", parents=[chosen]).set_defaults(run=check_mistakes)
    one = verbs.add_parser("run", help="plant them and run tests", parents=[chosen])
    one.add_argument("--coverage", nargs="+", required=True, help="JSON files that suite_coverage.py recorded")
    one.add_argument("--out", required=True, help="the JSON to write")
    one.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mistakes alone")
    one.add_argument("--jobs", type=int, default=2, help="mistakes at a time")
    one.add_argument("--timeout", type=float, default=900, help="seconds for a test file, or thrice what it took once")
    one.set_defaults(run=run_mistakes)
    two = verbs.add_parser("summary", help="a table, and with two results what the second misses")
    two.add_argument("results", nargs="+")
    two.set_defaults(run=print_summary)
    given = parser.parse_args()
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main())
