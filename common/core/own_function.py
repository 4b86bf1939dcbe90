"""Functions and classes of a user's own file, written `FILE.py:name`: loading one, and its errors with file and line.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import runpy
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.core.errors import UserError

MODULE = "own_function"  # what such a file is called while it is executed


def locate_function_file(setting: str, value: str, known: str, kind: str = "function") -> str:
    """Return the file of `FILE.py:function`; `known` are the other values of the setting. Raises UserError.

    `kind` is what the file has to define, in words.
    """
    file = value.rpartition(":")[0]
    if Path(file).suffix != ".py":
        raise UserError(f"{setting}={value} is neither FILE.py:{kind} nor one of {known}; use one of these")
    if not Path(file).is_file():
        problem = f"there is no file {Path(file).absolute()}"
        raise UserError(f"{setting}={value}: {problem}; name an existing FILE.py:{kind}, or use one of {known}")
    return file


def find_kept_file(kind: str, value: str, code: Path) -> Path:
    """Return where a run keeps the file of `FILE.py:function` in its source; a resume may name another file.

    `kind` is what the function makes, such as `schedule`.
    """
    digest = hashlib.sha256(os.fsencode(value.rpartition(":")[0])).hexdigest()[:8]
    return code / "own" / f"{kind}-{digest}.py"


def prefer_kept(value: str, kept: Path | None) -> str:
    """Return `FILE.py:function` with the file to read: the one that a run has kept in its source, else that named.

    The run goes on with the file as it was when it began.
    """
    return f"{kept}:{value.rpartition(':')[2]}" if kept is not None and kept.is_file() else value


def load_function(setting: str, value: str, known: str, kind: str = "function") -> Callable[..., Any]:
    """Return the function, or with `kind` Class the class, that `setting=FILE.py:name` names.

    `known` are the other values of the setting, for messages. Raises UserError.
    """
    file, name = locate_function_file(setting, value, known, kind), value.rpartition(":")[2]
    with locate_errors(setting, value):
        found = runpy.run_path(file, run_name=MODULE)  # an import would leave a __pycache__ beside the file
    fits = inspect.isclass if kind == "Class" else inspect.isfunction
    function: Callable[..., Any] | None = found.get(name)
    if not callable(function) or (kind == "Class" and not inspect.isclass(function)):
        defined = [name for name, one in found.items() if fits(one) and one.__module__ == MODULE]
        remedy = f"it has {', '.join(defined)}" if defined else f"define it there, or use one of {known}"
        what = f"{file} has no {kind.lower()} {name!r}; {remedy}"
        raise UserError(f"{setting}={value}: {what}")
    return function


@contextlib.contextmanager
def locate_errors(
    setting: str, value: str, function: Callable[..., Any] | None = None, usage: str = ""
) -> Iterator[None]:
    """Turn any error into a UserError of one line that names the user's file and the line in it.

    The line is the innermost one of that file that was executed. Where none was, as for a wrong return value, it is the
    one where `function` begins, and a TypeError is told with `usage`: how it is called and what it returns.
    """
    file = value.rpartition(":")[0]
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 (it is the user's code)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        kind, text = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
        what = f"{kind}: {text}" if text else kind
        if not lines and isinstance(error, SyntaxError):  # of this very file: str(error) would name it once more
            lines, what = [error.lineno], f"{kind}: {error.msg}"
        elif not lines:
            lines = [getattr(getattr(function, "__code__", None), "co_firstlineno", None)]
            what = f"{text}; {usage}" if usage and isinstance(error, TypeError) else text or kind
        at = f"{file}:{lines[-1]}" if lines[-1] else file
        raise UserError(f"{setting}={value}: {at}: {what}") from None
