"""Print the findings of each rule that product code exceeds: `python -m tests.readability [--all] [PATH ...]`.

Without PATH it checks common, slurm, experiments, configs and README.md. With `--all` it prints all findings.
Exit status 1: a ceiling is exceeded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.readability import rules
from tests.readability.inspection import ROOT, Finding, inspect_file

PRODUCT = ("common", "slurm", "experiments", "configs", "README.md")
NO_PHRASE = Path("README.md")  # most users read nothing else


def list_files(paths: list[str]) -> list[Path]:
    """Return the Python files and pages below the paths that git tracks."""
    command = ["git", "ls-files", "--", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in names if name.endswith((".py", ".md"))]
    return [path for path in files if (ROOT / path).is_file()]


def measure(rule: rules.Rule, sizes: Counter[str], findings: list[Finding]) -> float:
    """Return the measure that a rule limits."""
    count = sizes["tokens"] if rule.count == "tokens" else len(findings)
    size = max(1, sizes[rule.size]) if rule.size else 1
    return rule.scale * count / size


def check(paths: list[Path], *, is_verbose: bool) -> bool:
    """Print each rule that is exceeded with its findings; return whether all hold."""
    sizes: Counter[str] = Counter()
    findings: list[Finding] = []
    for path in paths:
        inspection = inspect_file(path)
        sizes.update(inspection.sizes)
        findings += inspection.findings

    passed = True
    for rule in rules.RULES:
        kind = "long statement" if rule.count == "tokens" else rule.count
        of_rule = [finding for finding in findings if finding.kind == kind]
        measured = measure(rule, sizes, of_rule)
        in_readme = [finding for finding in of_rule if finding.path == NO_PHRASE]
        is_exceeded = measured > rule.ceiling or bool(in_readme)
        passed = passed and not is_exceeded
        if is_exceeded or is_verbose:
            for finding in of_rule:
                remedy = rule.remedy.format(finding.replacement)
                print(f"{finding.path}:{finding.line}: {finding.text}; {remedy}")
        if is_exceeded:
            print(f"error: {rule.name}: {measured:.2f}, at most {rule.ceiling:g}; see the lines above")
    return passed


def main() -> int:
    """Check the files and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="folders or files, relative to the root of the repository")
    parser.add_argument("--all", action="store_true", help="print all findings, also of rules that hold")
    arguments = parser.parse_args()
    files = list_files(arguments.paths or list(PRODUCT))
    if not files:
        print("error: git tracks no Python file and no page below these paths", file=sys.stderr)
        return 2
    return 0 if check(files, is_verbose=arguments.all) else 1


if __name__ == "__main__":
    sys.exit(main())
