"""What make hands over: the words of the command behind a target, told by a python that only writes them down."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

from tests.harness import inside
from tests.harness.processes import environment, script


def handed_over(place: Path, *words: str) -> list[str]:
    """The words that `make` with these words gives to python, of which the first are -m and the module's name."""
    script(place / ".venv/bin/python", "printf '%s\\0' \"$@\" > words")
    done = subprocess.run(
        ["make", *words], cwd=place, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    file = place / "words"
    found = file.read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    file.unlink()
    return found


def call(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Let make hand over, and call the command within this process, in make's folder."""
    switch, module, *rest = handed_over(place, *words)
    assert switch == "-m"
    return inside.call(importlib.import_module(module).main, *rest, cwd=place)
