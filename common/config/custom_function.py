"""Load functions and classes from a user's file, given as `FILE.py:name`, and report their errors with file and line.

This module does not import torch.
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

from common.system.errors import UserError

MODULE = "own_function"  # value of __name__ while the user's file is executed


def locate_function_file(setting: str, value: str, alternatives: str, kind: str = "function") -> str:
    """Return the file named in `FILE.py:function`. Raises UserError if there is no such file.

    `alternatives` lists the other values of the setting. `kind` is what the file must define: function or Class.
    """
    file = value.rpartition(":")[0]
    if Path(file).suffix != ".py":
        raise UserError(f"{setting}={value}: expected FILE.py:{kind} or one of {alternatives}")
    if not os.path.isfile(file):
        problem = f"there is no file {Path(file).absolute()}"
        raise UserError(f"{setting}={value}: {problem}; name an existing FILE.py:{kind}, or use one of {alternatives}")
    return file


def locate_file_copy(kind: str, value: str, code: Path) -> Path:
    """Return the path at which a run stores its copy of the file named in `FILE.py:function`.

    The path depends on the file name, because a resumed run may use another file. `kind` is the purpose of the
    function, such as `schedule`.
    """
    digest = hashlib.sha256(os.fsencode(value.rpartition(":")[0])).hexdigest()[:8]
    return code / "own" / f"{kind}-{digest}.py"


def replace_file_with_run_copy(value: str, copy: Path | None) -> str:
    """Replace the file in `FILE.py:function` with the run's copy if the copy exists.

    A resumed run therefore uses the file as it was when the run started.
    """
    if copy is None or not copy.is_file():
        return value
    return f"{copy}:{value.rpartition(':')[2]}"


def load_function(setting: str, value: str, alternatives: str, kind: str = "function") -> Callable[..., Any]:
    """Load the function, or the class if `kind` is Class, that `setting=FILE.py:name` specifies.

    Raises UserError if the file does not define `name`. `alternatives` lists the other values of the setting.
    """
    file = locate_function_file(setting, value, alternatives, kind)
    name = value.rpartition(":")[2]
    with convert_errors_of_user_file(setting, value):
        namespace = runpy.run_path(file, run_name=MODULE)  # an import would leave a __pycache__ next to the file
    function: Callable[..., Any] | None = namespace.get(name)
    if callable(function) and (kind != "Class" or inspect.isclass(function)):
        return function

    has_kind = inspect.isclass if kind == "Class" else inspect.isfunction
    defined = [name for name, member in namespace.items() if has_kind(member) and member.__module__ == MODULE]
    remedy = f"it has {', '.join(defined)}" if defined else f"define it there, or use one of {alternatives}"
    problem = f"{file} has no {kind.lower()} {name!r}" if name else f"the name of a {kind.lower()} is missing"
    raise UserError(f"{setting}={value}: {problem}; {remedy}")


@contextlib.contextmanager
def convert_errors_of_user_file(
    setting: str,
    value: str,
    function: Callable[..., Any] | None = None,
    usage: str = "",
    displayed_file: Path | None = None,
) -> Iterator[None]:
    """Convert any error to a one-line UserError that names the user's file and line.

    The line is the innermost executed line of that file. If no line of the file was executing, for example after an
    invalid return value, the line is the first line of `function`. In this case, `usage`, which describes the arguments
    and the return value, is added to a TypeError. If `value` names a copy of the user's file, the message names
    `displayed_file` instead.
    """
    file = value.rpartition(":")[0]
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 (any code may run in the user's file)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        error_type = type(error).__name__
        message = (str(error).strip().splitlines() or [""])[0]
        if lines:
            line = lines[-1]
            problem = f"{error_type}: {message}" if message else error_type
        elif isinstance(error, SyntaxError):  # in the user's file; str(error) would repeat the file name
            line = error.lineno
            problem = f"{error_type}: {error.msg}"
        else:
            code = getattr(function, "__code__", None)
            line = code.co_firstlineno if code and code.co_filename == file else None
            problem = message or error_type
            if usage and isinstance(error, TypeError):
                problem = f"{message}; {usage}"
        shown_file = str(displayed_file or file)
        location = f"{shown_file}:{line}" if line else shown_file
        raise UserError(f"{setting}={shown_file}:{value.rpartition(':')[2]}: {location}: {problem}") from None
