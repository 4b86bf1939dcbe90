"""Options and `key=value` arguments of a command line. This module does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from common.system.errors import UserError
from common.system.output import discard_standard_output, explain_full_output

USAGE = "[--help] [--print-config] [--config FILE | --resume RUN_FOLDER] [key=value ...]"
OPTION_VALUES = {
    "--config": "file, such as runs/<id>/config.yaml",
    "--resume": "run folder, such as runs/<id>",
}


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Options and values of a command line, before the values are converted to their types."""

    help: bool
    print_config: bool
    file: Path | None
    resume: Path | None
    values: dict[str, str]


def check_script(script: Path, experiment: str) -> None:
    """Raise UserError if a script in the folder `experiments` has the config of another experiment.

    Resumed runs, reruns and jobs execute the script that is named after the config.
    """
    if script.parent.name != "experiments" or script.stem == experiment:
        return
    problem = f"{script.name} has the config of {experiment}, so resumed runs and jobs would execute {experiment}.py"
    remedy = f"make new-experiment NAME={script.stem} writes a script with its own config"
    raise UserError(f"{problem}; {remedy}")


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Split a command line into options and key=value pairs. Raises UserError for an invalid argument."""
    remaining = list(arguments)
    values: dict[str, str] = {}
    show_help = False
    print_config = False
    paths: dict[str, Path] = {}
    while remaining:
        argument = remaining.pop(0)
        name, separator, text = argument.partition("=")
        if argument in ("--help", "-h"):
            show_help = True
        elif argument == "--print-config":
            print_config = True
        elif name in OPTION_VALUES:
            if not text and remaining:
                text = remaining.pop(0)
            if not text:
                raise UserError(f"{name} requires a {OPTION_VALUES[name]}")
            paths[name] = Path(text)
        elif argument.startswith("-") or not separator:
            expected = "expected key=value (no spaces, no leading dashes)"
            raise UserError(f"unexpected argument {argument!r}: {expected}; usage: {USAGE}")
        elif not text.isprintable():
            raise UserError(f"{name}={text!r}: line breaks and control characters are not allowed")
        else:
            values[name] = text
    if len(paths) > 1:
        raise UserError("--config and --resume exclude each other; a resumed run has its own settings")
    return CommandLine(show_help, print_config, paths.get("--config"), paths.get("--resume"), values)


def print_text(text: str) -> None:
    """Print text. Ignore a closed pipe, for example if the output is piped to `head`.

    Raises UserError if standard output is on a full disk.
    """
    try:
        with explain_full_output():
            print(text, flush=True)
    except BrokenPipeError:
        discard_standard_output()
