"""Files, functions and packages stay short enough to be read."""

from __future__ import annotations

import ast

from tests.harness.warm import ROOT

SOURCES = [path for name in ("common", "slurm", "experiments", "configs") for path in (ROOT / name).rglob("*.py")]


def test_a_file_has_300_lines_and_a_function_50_at_most() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        defined = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        assert not [node.name for node in defined if (node.end_lineno or 0) - node.lineno >= 50], path


def test_a_package_has_12_modules_at_most() -> None:
    folders = {path.parent for path in SOURCES if path.relative_to(ROOT).parts[0] in ("common", "slurm")}
    counts = {folder: len([path for path in folder.glob("*.py") if path.stem != "__init__"]) for folder in folders}
    assert not [folder.name for folder, count in counts.items() if count > 12]
