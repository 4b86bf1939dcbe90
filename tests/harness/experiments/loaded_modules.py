"""List the modules of `common` that an experiment loads.

    python -m tests.harness.experiments.loaded_modules FOLDER "NAME=key=value ..."     after training, on rank 0
    python -m tests.harness.experiments.loaded_modules FOLDER NAME                     after importing the script

The list of each experiment is written to FOLDER/NAME.json. Experiments are forked from a process that has imported
torch but no module of this project.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tokenize
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tests.readability.python_tokens import list_tokens

LAYOUT_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@functools.cache
def count_tokens(file: str) -> int:
    """Return the number of tokens of a source file, without comments and layout."""
    source = Path(file).read_text()
    return sum(token.type not in LAYOUT_TOKENS for token in list_tokens(source))


def list_loaded_modules() -> dict[str, str]:
    """Return the file of each loaded module of `common`, by module name."""
    files = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "common" and module.__file__:
            files[name] = str(module.__file__)
    return files


def train_and_list_modules(name: str, settings: list[str], file: Path) -> None:
    """Train an experiment. Rank 0 writes the list of its modules to `file` after the final report."""
    sys.argv = [f"{name}.py", *settings, f"runs={file.parent / 'runs'}"]
    script = importlib.import_module(f"experiments.{name}")
    run_class: Any = script.Run
    report = run_class.report

    def report_and_list(run: Any, *reports: Any) -> None:
        report(run, *reports)
        if run.world.is_main:
            file.write_text(json.dumps(list_loaded_modules()))

    run_class.report = report_and_list
    script.start(script.main, script.Config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        name, _, settings_text = argument.partition("=")
        child = os.fork()
        if child == 0 and settings_text:
            train_and_list_modules(name, settings_text.split(), folder / f"{name}.json")
        elif child == 0:
            importlib.import_module(f"experiments.{name}")
            (folder / f"{name}.json").write_text(json.dumps(list_loaded_modules()))
            os._exit(0)
        exit_status = os.waitpid(child, 0)[1]
        if exit_status:
            sys.exit(f"{name} ended with status {exit_status}")
