"""Check the readability of code and pages: `python -m tests.readability [--all] [PATH ...]`.

Product code, tests and pages have limits of their own (rules.py). Prints the findings of each rule whose limit is
exceeded. With `--all`, prints the findings of all rules. Without PATH, checks common, slurm, experiments, configs,
tests and all Markdown files. The exit status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.readability import rules
from tests.readability.inspection import ROOT, Finding, inspect_file

DEFAULT_PATHS = ("common", "slurm", "experiments", "configs", "tests", "*.md")


def list_tracked_files(paths: Sequence[str]) -> list[Path]:
    """Return the Python and Markdown files below `paths` that git tracks."""
    command = ["git", "ls-files", "--", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in names if name.endswith((".py", ".md"))]
    return [path for path in files if (ROOT / path).is_file()]


def select_scope(path: Path) -> str:
    """Return the scope whose limits apply to a file: a key of rules.SCOPES."""
    if path.suffix == ".md":
        return "pages"
    return "tests" if path.parts[0] == "tests" else "product"


def compute_rule_value(rule: rules.Rule, sizes: Counter[str], findings: list[Finding]) -> float:
    """Return the measured value that a rule limits."""
    count = sizes["tokens"] if rule.count == "tokens" else len(findings)
    size = max(1, sizes[rule.size]) if rule.size else 1
    return rule.scale * count / size


def check_scope(scope: str, paths: list[Path], *, is_verbose: bool) -> bool:
    """Print the findings of each rule of a scope whose limit is exceeded; return whether no limit is exceeded."""
    sizes: Counter[str] = Counter()
    findings: list[Finding] = []
    for path in paths:
        inspection = inspect_file(path)
        sizes.update(inspection.sizes)
        findings += inspection.findings

    passed = True
    for rule in rules.SCOPES[scope]:
        kind = "long statement" if rule.count == "tokens" else rule.count
        of_rule = [finding for finding in findings if finding.kind == kind]
        measured = compute_rule_value(rule, sizes, of_rule)
        is_exceeded = measured > rule.ceiling
        passed = passed and not is_exceeded
        if is_exceeded or is_verbose:
            for finding in of_rule:
                remedy = rule.remedy.format(finding.replacement)
                print(f"{finding.path}:{finding.line}: {finding.text}; {remedy}")
        if is_exceeded:
            limit = f"the limit for {scope} is {rule.ceiling:g}"
            print(f"error: {rule.name}: measured {measured:.2f}, but {limit}; fix the findings above")
    return passed


def check_files(paths: list[Path], *, is_verbose: bool) -> bool:
    """Check each file by the limits of its scope; return whether no limit is exceeded."""
    passed = True
    for scope in rules.SCOPES:
        in_scope = [path for path in paths if select_scope(path) == scope]
        passed = check_scope(scope, in_scope, is_verbose=is_verbose) and passed
    return passed


def main() -> int:
    """Check the files and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="folders or files to check, relative to the repository root")
    parser.add_argument("--all", action="store_true", help="print all findings, including those within the limits")
    arguments = parser.parse_args()
    files = list_tracked_files(arguments.paths or DEFAULT_PATHS)
    if not files:
        print("error: these paths contain no Python or Markdown file that git tracks", file=sys.stderr)
        return 2
    return 0 if check_files(files, is_verbose=arguments.all) else 1


if __name__ == "__main__":
    sys.exit(main())
