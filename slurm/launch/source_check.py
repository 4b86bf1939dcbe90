"""Check a run's copy of the source code before a command executes it."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError
from common.system.text import read_text_or_empty

MAX_DAMAGED_FILES = 5  # maximum number of files that a message lists


def check_source(folder: RunFolder) -> None:
    """Raise UserError if a file in a run's `code/` is missing or has changed since it was copied.

    If the run stored no checksums, only Python files with syntax errors are detected.
    """
    code = folder.path / "code"
    damaged = []
    lines = read_text_or_empty(str(code / provenance.CHECKSUMS)).splitlines()
    for line in lines:
        digest, _, name = line.partition("  ")
        path = code / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            damaged.append(name)
    if not lines:
        damaged = find_unparsable_files(code)
    if damaged:
        names = ", ".join(damaged[:MAX_DAMAGED_FILES])
        if len(damaged) > MAX_DAMAGED_FILES:
            names += ", ..."
        raise UserError(
            f"the run's copy of the source code is damaged: {names} in {code}; restore the files or start a new run. "
            f"If the changes were intentional, delete {code / provenance.CHECKSUMS}"
        )


def find_unparsable_files(code: Path) -> list[str]:
    """Return the Python files below a folder that cannot be parsed, as paths relative to the folder."""
    damaged = []
    for path in code.rglob("*.py"):
        try:
            ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            damaged.append(str(path.relative_to(code)))
    return damaged
