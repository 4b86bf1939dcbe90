"""Measure the quantities that rules.py limits in one Python or Markdown file."""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.readability import rules
from tests.readability.python_tokens import list_tokens

ROOT = Path(__file__).parents[2]
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
NO_CODE = frozenset((tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER))


@dataclass(frozen=True)
class Finding:
    """A place in a file that counts toward the limit of a rule."""

    path: Path
    line: int
    kind: str
    text: str
    replacement: str = ""


@dataclass
class Inspection:
    """The sizes and findings of one file."""

    path: Path
    sizes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add_finding(self, line: int, kind: str, text: str, replacement: str = "") -> None:
        """Record a finding."""
        self.findings.append(Finding(self.path, line, kind, text, replacement))


def list_docstrings(nodes: list[ast.AST]) -> list[ast.Constant]:
    """Return the docstrings of modules, classes and functions, and the strings that document fields."""
    docstrings = []
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.append(node.value)
    return docstrings


def inspect_statements(inspection: Inspection, source: str, docstring_lines: set[int]) -> None:
    """Count the tokens of each statement, ignoring docstrings, comments and blank lines."""
    code_lines: set[int] = set()
    first_line = 0
    length = 0
    for token in list_tokens(source):
        if token.type in NO_CODE or token.start[0] in docstring_lines:
            continue
        if token.type == tokenize.NEWLINE:
            inspection.sizes["statements"] += 1
            if length > rules.MAX_STATEMENT_TOKENS:
                inspection.add_finding(first_line, "long statement", f"a statement of {length} tokens")
            length = 0
            continue
        if length == 0:
            first_line = token.start[0]
        length += 1
        inspection.sizes["tokens"] += 1
        code_lines.update(range(token.start[0], token.end[0] + 1))
    inspection.sizes["code_lines"] = len(code_lines)


def list_bound_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each definition of a variable, attribute, parameter, function or class."""
    idiomatic = set()
    for node in nodes:
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
            idiomatic.add((node.lineno, node.value.id))  # a starred name, such as `first, *rest`
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if (node.lineno, node.id) not in idiomatic:
                yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name


def inspect_names(inspection: Inspection, nodes: list[ast.AST]) -> None:
    """Count names, and record those that do not describe their values."""
    for line, name in list_bound_names(nodes):
        inspection.sizes["names"] += 1
        word = name.strip("_").lower()
        if word in rules.VAGUE_NAMES:
            inspection.add_finding(line, "vague name", f"vague name `{name}`")
        elif word in rules.GENERIC_NAMES:
            inspection.add_finding(line, "generic name", f"generic name `{name}`")


def is_multiple_assignment(target: ast.expr, assigned: ast.expr) -> bool:
    """Return whether an assignment has the form `a, b = x, y`. A swap such as `a, b = b, a` does not count."""
    if not isinstance(target, ast.Tuple) or not isinstance(assigned, ast.Tuple):
        return False
    return sorted(map(ast.unparse, target.elts)) != sorted(map(ast.unparse, assigned.elts))


def inspect_assignment(inspection: Inspection, node: ast.Assign) -> None:
    """Count an assignment, and record it if it assigns several values."""
    inspection.sizes["assignments"] += 1
    target = node.targets[0]
    if len(node.targets) > 1:
        inspection.add_finding(node.lineno, "tuple assignment", "several targets in one statement")
    elif is_multiple_assignment(target, node.value):
        inspection.add_finding(node.lineno, "tuple assignment", "several assignments in one statement")


def inspect_comprehension(inspection: Inspection, node: Comprehension) -> None:
    """Count a comprehension, and record it if it has two `for`, two `if` or an inner comprehension."""
    inspection.add_finding(node.lineno, "comprehension", "a comprehension")
    conditions = sum(len(generator.ifs) for generator in node.generators)
    inner = [child for child in ast.walk(node) if isinstance(child, Comprehension)]
    if len(node.generators) > 1 or conditions > 1 or len(inner) > 1:
        inspection.add_finding(node.lineno, "nested comprehension", "several loops or conditions in one comprehension")


def inspect_assignments_and_calls(inspection: Inspection, nodes: list[ast.AST]) -> None:
    """Count assignments, comprehensions, and calls that unpack a value of type Any."""
    typed_any = set()
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Any":
            typed_any.add(ast.unparse(node.target))
    for node in nodes:
        if isinstance(node, ast.Assign):
            inspect_assignment(inspection, node)
        elif isinstance(node, Comprehension):
            inspect_comprehension(inspection, node)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id in typed_any:
                    inspection.add_finding(
                        node.lineno, "unpacked Any", f"unpacked value of type Any: `**{keyword.value.id}`"
                    )


def inspect_messages(inspection: Inspection, nodes: list[ast.AST], docstrings: list[ast.Constant]) -> None:
    """Record odd phrases in strings other than docstrings, joining the parts of an f-string to one text."""
    skipped = set(map(id, docstrings))
    texts: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            skipped.update(map(id, parts))
            texts.append((node.lineno, " _ ".join(str(part.value) for part in parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            texts.append((node.lineno, node.value))
    for line, text in texts:
        for _, phrase, replacement in rules.find_phrases(text, rules.PHRASES | rules.MESSAGE_PHRASES):
            inspection.add_finding(line, "odd message", f"odd phrase `{phrase}` in a message", replacement)


def inspect_file(path: Path) -> Inspection:
    """Return the sizes and findings of a Python file, or the odd phrases of a Markdown file.

    A relative path is resolved from ROOT.
    """
    source = (ROOT / path).read_text(encoding="utf-8")
    inspection = Inspection(path)
    inspection.sizes["lines"] = source.count("\n")
    for position, phrase, replacement in rules.find_phrases(source, rules.PHRASES):
        line = source.count("\n", 0, position) + 1
        inspection.add_finding(line, "odd phrase", f"odd phrase `{phrase}`", replacement)
    if path.suffix != ".py":
        return inspection

    nodes = list(ast.walk(ast.parse(source)))
    docstrings = list_docstrings(nodes)
    docstring_lines: set[int] = set()
    for docstring in docstrings:
        docstring_lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    inspect_statements(inspection, source, docstring_lines)
    inspect_names(inspection, nodes)
    inspect_assignments_and_calls(inspection, nodes)
    inspect_messages(inspection, nodes, docstrings)
    return inspection
