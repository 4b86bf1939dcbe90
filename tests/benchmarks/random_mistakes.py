"""Draw small random changes of product code, for `planted_mistakes.py run --list`.

    python tests/benchmarks/random_mistakes.py OUT.json --coverage COVERAGE.json --seed 7 --count 20

Each change is on a line that the recorded test suites execute, so that a test could notice it. Changes are those of
mutation testing (https://doi.org/10.1109/TSE.2010.62): another comparison, arithmetic operator, constant or logical
operator, or an inverted condition. Some do not change what the program does, and no test can notice them.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


def change_expression(expression: ast.expr) -> ast.expr | None:
    """Return a changed copy of an expression, or None if no change is known for it."""
    changed: Any = copy.deepcopy(expression)
    match changed:
        case ast.Compare():
            changed.ops[0] = COMPARISONS[type(changed.ops[0])]()
        case ast.BinOp() if type(changed.op) in OPERATORS:
            changed.op = OPERATORS[type(changed.op)]()
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return changed.operand
        case ast.Constant(value=bool()):
            changed.value = not changed.value
        case ast.Constant(value=int() as value):
            changed.value = value + 1
        case ast.IfExp():
            changed.body, changed.orelse = changed.orelse, changed.body
        case _:
            return None
    return changed


def list_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements whose first lines coverage records, without definitions and imports."""
    ignored = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ignored):
            yield node


def list_mistakes(name: str, executed_lines: set[int]) -> list[dict[str, str]]:
    """Return all known changes of a file whose old text is a complete line that occurs once in the file."""
    source = (ROOT / name).read_text()
    lines = source.splitlines()
    mistakes = []
    for statement in list_statements(ast.parse(source)):
        line = lines[statement.lineno - 1]
        if statement.lineno not in executed_lines or lines.count(line) > 1:
            continue
        for node in ast.walk(statement):
            if not isinstance(node, ast.expr) or not node.lineno == node.end_lineno == statement.lineno:
                continue
            changed = change_expression(node)
            if changed is None:
                continue
            data = line.encode()
            new = data[: node.col_offset] + f"({ast.unparse(changed)})".encode() + data[node.end_col_offset :]
            mistake_name = f"{name}:{node.lineno}:{node.col_offset}"
            mistakes.append({"name": mistake_name, "file": name, "old": f"{line}\n", "new": f"{new.decode()}\n"})
    return [mistake for mistake in mistakes if can_compile(source, mistake)]


def can_compile(source: str, mistake: dict[str, str]) -> bool:
    """Return whether the old text occurs once and the changed file compiles."""
    if source.count(mistake["old"]) != 1:
        return False
    try:
        compile(source.replace(mistake["old"], mistake["new"]), mistake["file"], "exec")
    except SyntaxError:
        return False
    return True


def read_executed_lines(coverage_files: list[str]) -> dict[str, set[int]]:
    """Return the executed lines of each product file, over all recorded test files."""
    executed: dict[str, set[int]] = {}
    for path in coverage_files:
        for test in json.loads(Path(path).read_text()).values():
            for name, file in test["files"].items():
                executed.setdefault(name, set()).update(file["lines"])
    return executed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the JSON to write")
    parser.add_argument("--coverage", nargs="+", required=True, help="JSON files that suite_coverage.py recorded")
    parser.add_argument("--seed", required=True, help="any text; the same seed draws the same changes")
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()

    mistakes = []
    for name, lines in sorted(read_executed_lines(arguments.coverage).items()):
        mistakes += list_mistakes(name, lines)
    drawn = random.Random(arguments.seed).sample(mistakes, arguments.count)
    Path(arguments.out).write_text(json.dumps(drawn, indent=1))
    print(f"{len(drawn)} of {len(mistakes)} changes drawn with seed {arguments.seed}:")
    for mistake in drawn:
        print(f"  {mistake['name']}: {mistake['old'].strip()}  ->  {mistake['new'].strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
