"""Parsers for arguments of the commands: names, counts, switches, lists. Imports no torch."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable

from common.core.errors import UserError

EXPERIMENT_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def check_experiment_name(name: str) -> str:
    """Return the name of an existing experiment. Raises UserError that suggests the nearest name."""
    from common.core import config  # imports OmegaConf, which the local cluster does not need

    experiments = config.list_experiments()
    listing = f"(experiments: {', '.join(experiments)})"
    if not name:
        raise UserError(f"NAME is missing; write make exp NAME={experiments[0]} {listing}")
    if not EXPERIMENT_NAME.fullmatch(name) or name not in experiments:
        raise UserError(f"no experiment {name!r}{suggest_nearest(name, experiments)} {listing}")
    return name


def suggest_nearest(word: str, candidates: Iterable[str]) -> str:
    """Return a question that suggests the nearest candidate; empty if none is near."""
    matches = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def parse_count(name: str, text: str, maximum: int = 99_999) -> int:
    """Parse a number from 1 to `maximum`. Raises UserError."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= maximum:
        raise UserError(f"{name}={text!r}: write a number from 1 to {maximum}")
    return int(text)


def split_words(name: str, text: str) -> list[str]:
    """Split the value of a setting like a shell, without expansions. Raises UserError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{name}={text!r} cannot be split into words: {error}") from None


def parse_switch(name: str, text: str) -> bool:
    """Parse `1` as true, `0` or nothing as false. Raises UserError for other values."""
    if text not in ("", "0", "1"):
        raise UserError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def split_arguments(text: str) -> tuple[list[str], list[str]]:
    """Split ARGS into arguments for the experiment and `cluster.key=value` arguments for the profile."""
    arguments = split_words("ARGS", text)
    for_profile = [argument for argument in arguments if re.match(r"cluster\.\w+=", argument)]
    return [argument for argument in arguments if argument not in for_profile], for_profile


def split_settings(text: str) -> tuple[list[str], list[str]]:
    """Split ARGS into the settings of a run and those of a profile. Raises UserError for a command-line option."""
    arguments, for_profile = split_arguments(text)
    for argument in arguments:
        if argument.startswith("-"):
            raise UserError(
                f"ARGS: {argument} is not a setting; write key=value "
                "(make exp NAME=<experiment> ARGS=--help lists the settings)"
            )
    return arguments, for_profile
