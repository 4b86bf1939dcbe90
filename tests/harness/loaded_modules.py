"""The modules of `common` that rank 0 of each experiment has loaded after 20 steps, and how many tokens they have.

python -m tests.harness.loaded_modules FOLDER NAME=WORD,WORD ...   writes FOLDER/NAME.json for each experiment

Experiments are forks of a process that has imported torch and nothing of this project.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tokenize
from pathlib import Path
from typing import Any

import torch
import torch.distributed  # noqa: F401 (every run imports it)

LAYOUT_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def count_tokens(file: Path) -> int:
    """The tokens of a source file without its docstrings, as statements of their own, and comments."""
    with open(file, "rb") as source:
        tokens = [token for token in tokenize.tokenize(source.readline) if token.type not in LAYOUT_TOKENS]
    return len(tokens)


def list_loaded_modules() -> dict[str, int]:
    """Each loaded module of `common` with its tokens."""
    loaded = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "common"}
    return {name: count_tokens(Path(str(module.__file__))) for name, module in sorted(loaded.items()) if module.__file__}


def train(name: str, words: list[str], file: Path) -> None:
    """Train an experiment in this process and its ranks; rank 0 writes down its modules at the end."""
    sys.argv = [f"{name}.py", *words, f"runs={file.parent / 'runs'}"]
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
        name, _, words = argument.partition("=")
        child = os.fork()
        if child == 0:
            train(name, words.split(), folder / f"{name}.json")
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{name} ended with {status}")
