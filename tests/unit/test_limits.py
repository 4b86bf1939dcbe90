"""Files and functions of the product code are short."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.harness.repository import ROOT

FOLDERS = ("common", "slurm", "experiments", "configs")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def find_long_parts(path: Path) -> list[str]:
    """Return a message for the file if it is too long, and for each function that is too long."""
    messages = []
    text = path.read_text()
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        messages.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES} are allowed")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            messages.append(f"{path}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}")
    return messages


def test_files_and_functions_are_short() -> None:
    too_long = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            too_long += find_long_parts(path)
    assert not too_long, "split by meaning:\n" + "\n".join(too_long)
