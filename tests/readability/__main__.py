"""Check the readability of product code: `python -m tests.readability [--all] [PATH ...]`.

Prints the findings of each rule whose limit is exceeded. With `--all`, prints the findings of all rules. Without PATH,
checks common, slurm, experiments, configs and README.md. The exit status is 1 if a limit is exceeded.
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
NO_PHRASE = Path("README.md")  # must not contain any finding, because many users read only this page


def list_tracked_files(paths: list[str]) -> list[Path]:
    """Return the Python and Markdown files below `paths` that git tracks."""
    command = ["git", "ls-files", "--", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in names if name.endswith((".py", ".md"))]
    return [path for path in files if (ROOT / path).is_file()]


def compute_rule_value(rule: rules.Rule, sizes: Counter[str], findings: list[Finding]) -> float:
    """Return the measured value that a rule limits."""
    count = sizes["tokens"] if rule.count == "tokens" else len(findings)
    size = max(1, sizes[rule.size]) if rule.size else 1
    return rule.scale * count / size


def check_files(paths: list[Path], *, is_verbose: bool) -> bool:
    """Print the findings of each rule whose limit is exceeded; return whether no limit is exceeded."""
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
        measured = compute_rule_value(rule, sizes, of_rule)
        in_readme = [finding for finding in of_rule if finding.path == NO_PHRASE]
        is_exceeded = measured > rule.ceiling or bool(in_readme)
        passed = passed and not is_exceeded
        if is_exceeded or is_verbose:
            for finding in of_rule:
                remedy = rule.remedy.format(finding.replacement)
                print(f"{finding.path}:{finding.line}: {finding.text}; {remedy}")
        if is_exceeded:
            limits = f"the limit is {rule.ceiling:g} (0 findings in README.md)"
            print(f"error: {rule.name}: measured {measured:.2f}, but {limits}; fix the findings above")
    return passed


def main() -> int:
    """Check the files and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="folders or files to check, relative to the repository root")
    parser.add_argument("--all", action="store_true", help="print all findings, including those within the limits")
    arguments = parser.parse_args()
    files = list_tracked_files(arguments.paths or list(PRODUCT))
    if not files:
        print("error: these paths contain no Python or Markdown file that git tracks", file=sys.stderr)
        return 2
    return 0 if check_files(files, is_verbose=arguments.all) else 1


if __name__ == "__main__":
    sys.exit(main())
