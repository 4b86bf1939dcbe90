"""`make tour`: every experiment at its smallest, one after the other, and then all of them side by side.

python -m tests.tour [key=value ...]        settings for all of them, after their own
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from common.core import config
from slurm import selection
from tests.harness.registry import EXPERIMENTS

SMALL = ("epochs=1", "steps=30", "data.test_limit=1000")


def settings(name: str) -> tuple[str, ...]:
    """The smallest settings of an experiment; of one that the tests do not know yet, a few steps."""
    return SMALL + next((entry.smallest for entry in EXPERIMENTS if entry.name == name), ())


def main(more: list[str]) -> int:
    root = Path(config.parse(more).values.get("runs", "runs"))
    before = {folder.path for folder in selection.everything(root)}
    began, failed = time.monotonic(), []
    for name in config.names():
        words = shlex.join([*settings(name), *more])
        print(f"\n---- {name}: make exp NAME={name} ARGS={shlex.quote(words)}", flush=True)
        command = [sys.executable, "-m", "slurm.submit", "--launch=local", f"--args={words}", "--", name]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"\n---- side by side, after {time.monotonic() - began:.0f} s", flush=True)
    made = [str(folder.path) for folder in selection.everything(root) if folder.path not in before]
    shown = 0
    if made:
        command = [sys.executable, "-m", "slurm.compare", f"--runs={root}", f"--pick={shlex.join(made)}"]
        shown = subprocess.run(command, check=False).returncode
    if failed:
        print(f"error: {', '.join(failed)} failed; what each said stands above", file=sys.stderr)
    return 1 if failed else shown


if __name__ == "__main__":
    with config.user_errors():
        sys.exit(main(sys.argv[1:]))
