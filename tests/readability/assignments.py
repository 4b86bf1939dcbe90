"""Check that no code changes an object of another package: `python -m tests.readability.assignments`.

Reports each assignment (`=`, `+=`, `del`, `setattr`, target of `for` or `with`) to an attribute of an object whose
class is defined in another package of this project, and each call of another package's one-line setter: a method that
only assigns its parameter or a constant to an attribute. Objects of libraries do not count. mypy decides the class of
an object. `setattr` is also reported for an object of unknown class. `object.__setattr__`, which changes frozen
objects, is always reported. The exit status is 1 if there are findings.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from mypy import build
from mypy.inspections import find_by_location
from mypy.modulefinder import BuildSource
from mypy.nodes import TypeInfo
from mypy.options import Options
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    Type,
    TypeOfAny,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)
from mypy.util import hard_exit

from tests.readability.inspection import ROOT

FOLDERS = ("common", "configs", "experiments", "slurm")
PARENTS_OF_PACKAGES = (PurePath("common/runs"), PurePath("common/techniques"))
"""Folders whose subfolders are packages of their own."""


@dataclass(frozen=True, order=True)
class Change:
    """A place where code changes an object of another package."""

    path: PurePath
    line: int
    text: str


def get_package(path: PurePath) -> str:
    """Return the package that contains a file, whose path is relative to the root. Each experiment is a package."""
    if path.parts[0] == "configs":
        return "configs"
    if path.parts[0] == "experiments":
        return ".".join(path.with_suffix("").parts)
    is_nested = any(path.is_relative_to(parent) for parent in PARENTS_OF_PACKAGES)
    return ".".join(path.parent.parts[: 3 if is_nested else 2])


def list_modules(root: Path) -> dict[str, PurePath]:
    """Return the path relative to `root` of each module of the project."""
    paths: dict[str, PurePath] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            paths[".".join(relative.with_suffix("").parts).removesuffix(".__init__")] = relative
    return paths


def infer_types(root: Path, paths: dict[str, PurePath]) -> build.BuildResult:
    """Run mypy on modules of the project, but not on the code of libraries, whose objects do not count."""
    options = Options()
    options.export_types = True
    options.preserve_asts = True
    options.incremental = False
    options.cache_dir = os.devnull
    options.follow_imports = "skip"
    options.ignore_missing_imports = True
    options.namespace_packages = True
    options.check_untyped_defs = True
    sources = [BuildSource(str(root / path), module, base_dir=str(root)) for module, path in paths.items()]
    return build.build(sources, options)


def is_of_library(unknown: AnyType) -> bool:
    """Return whether mypy does not know a type because it comes from a library, whose code is not read."""
    origin = unknown.source_any or unknown
    return origin.type_of_any == TypeOfAny.from_unimported_type


def list_classes(object_type: Type | None) -> list[TypeInfo | None]:
    """Return the classes that an object of this type may have; None stands for an unknown class."""
    match get_proper_type(object_type):
        case AnyType() as unknown if is_of_library(unknown):
            return []
        case None | AnyType() | Instance(type=TypeInfo(fullname="builtins.object")):
            return [None]
        case Instance(type=kind):
            return [kind]
        case CallableType() as function if function.is_type_obj():
            return [function.type_object()]
        case TypeType(item=item) | TypeVarType(upper_bound=item):
            return list_classes(item)
        case UnionType(items=items):
            kinds: list[TypeInfo | None] = []
            for item in items:
                kinds += list_classes(item)
            return kinds
    return []


def list_targets(statement: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement assigns to or deletes."""
    match statement:
        case ast.Assign() | ast.Delete():
            return list(statement.targets)
        case ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.comprehension():
            return [statement.target]
        case ast.withitem() if statement.optional_vars is not None:
            return [statement.optional_vars]
    return []


def list_assigned_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each attribute that a statement assigns to or deletes."""
    for statement in ast.walk(tree):
        for target in list_targets(statement):
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load):
                    yield part


def is_one_line_setter(function: ast.FunctionDef) -> bool:
    """Return whether a method only assigns one of its parameters or a constant to an attribute of its object."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    arguments = function.args
    parameters = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if len(statements) != 1 or not isinstance(statements[0], ast.Assign):
        return False
    match statements[0].targets[0], statements[0].value:
        case ast.Attribute(value=ast.Name(id=changed)), ast.Name(id=assigned):
            return parameters[:1] == [changed] and assigned in parameters[1:]
        case ast.Attribute(value=ast.Name(id=changed)), ast.Constant():
            return parameters[:1] == [changed]
    return False


def list_setters(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the full name of the class and the name of each one-line setter of a module."""
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name != "__init__" and is_one_line_setter(method):
                    yield f"{module}.{kind.name}", method.name


class Checker:
    """Finds the changes of other packages' objects in the files below `root`."""

    def __init__(self, root: Path) -> None:
        self.paths = list_modules(root)
        build_result = infer_types(root, self.paths)
        self.types = build_result.types
        self.typed_trees = {module: build_result.files[module] for module in self.paths}
        self.trees: dict[str, ast.Module] = {}
        self.setters: set[tuple[str, str]] = set()
        for module, path in self.paths.items():
            self.trees[module] = ast.parse((root / path).read_text(encoding="utf-8"))
            self.setters.update(list_setters(module, self.trees[module]))

    def find_changes(self) -> Iterator[Change]:
        """Yield the changes in all files."""
        setter_names = {name for _, name in self.setters}
        for module, tree in self.trees.items():
            for attribute in list_assigned_attributes(tree):
                yield from self._check_object(module, attribute.value, f"assignment to `{attribute.attr}`")
            for node in ast.walk(tree):
                match node:
                    case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[target, *_]):
                        yield from self._check_object(module, target, "`setattr`", unknown_counts=True)
                    case ast.Call(func=ast.Attribute(attr="__setattr__" | "__delattr__")):
                        yield self._create_change(module, node, "`__setattr__` of a frozen object")
                    case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in setter_names:
                        yield from self._check_setter(module, owner, name)

    def _check_object(
        self, module: str, changed: ast.expr, change: str, *, unknown_counts: bool = False
    ) -> Iterator[Change]:
        """Yield a change if another package defines the class of the object `changed`."""
        for kind in self._list_classes(module, changed):
            if kind is None:
                if unknown_counts:
                    yield self._create_change(module, changed, f"{change} of an object of unknown class")
            elif self._is_foreign(module, kind):
                yield self._create_change(module, changed, f"{change} of an object of {kind.fullname}")

    def _check_setter(self, module: str, owner: ast.expr, name: str) -> Iterator[Change]:
        """Yield a change if the method `name` of the object `owner` is a one-line setter of another package."""
        for kind in self._list_classes(module, owner):
            definer = kind.get_containing_type_info(name) if kind else None
            if definer is not None and (definer.fullname, name) in self.setters and self._is_foreign(module, definer):
                yield self._create_change(module, owner, f"call of the one-line setter {definer.fullname}.{name}")

    def _list_classes(self, module: str, expression: ast.expr) -> list[TypeInfo | None]:
        """Return the classes that the value of an expression may have; None stands for an unknown class."""
        end_line = expression.end_lineno or expression.lineno
        end_column = expression.end_col_offset or 0
        typed_expression = find_by_location(
            self.typed_trees[module], expression.lineno, expression.col_offset, end_line, end_column
        )
        return list_classes(self.types.get(typed_expression)) if typed_expression else [None]

    def _is_foreign(self, module: str, kind: TypeInfo) -> bool:
        """Return whether another package of this project than that of the module defines a class."""
        path = self.paths.get(kind.module_name)
        return path is not None and get_package(path) != get_package(self.paths[module])

    def _create_change(self, module: str, node: ast.expr, text: str) -> Change:
        """Describe a change at the position of `node`."""
        return Change(self.paths[module], node.lineno, text)


def main() -> int:
    """Print the changes and return the exit status."""
    changes = sorted(set(Checker(ROOT).find_changes()))
    for change in changes:
        print(f"{change.path}:{change.line}: {change.text}")
    if changes:
        print("error: code changes objects of other packages; pass the value to their constructor or to a method")
    return 1 if changes else 0


if __name__ == "__main__":
    hard_exit(main())  # a normal exit takes seconds to delete mypy's objects
