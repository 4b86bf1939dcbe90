"""Files and functions stay short enough to be read."""

from __future__ import annotations

import ast

from tests.harness.warm import ROOT

SOURCES = [path for name in ("common", "slurm", "experiments", "configs") for path in (ROOT / name).rglob("*.py")]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in SOURCES:
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            too_long.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES} are allowed")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                too_long.append(f"{path}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}")
    assert not too_long, "split by meaning:\n" + "\n".join(too_long)
