"""Parsers for what the commands are given: names, counts, switches, lists of words. Imports no torch."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable

from common.core.errors import UserError

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def check_experiment_name(name: str) -> str:
    """Return the name if there is such an experiment. Raises UserError with the nearest right one."""
    from common.core import config  # imports OmegaConf, which the local cluster does not need

    known = config.list_experiments()
    if not name:
        raise UserError(f"NAME is missing; write make exp NAME={known[0]} (experiments: {', '.join(known)})")
    if not NAME.fullmatch(name) or name not in known:
        hint = suggest_nearest(name, known)
        raise UserError(f"no experiment {name!r}{hint} (experiments: {', '.join(known)})")
    return name


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return a question for the nearest known word; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parse_count(name: str, text: str, most: int = 99_999) -> int:
    """Read a number from 1 to `most`. Raises UserError."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise UserError(f"{name}={text!r}: write a number from 1 to {most}")
    return int(text)


def split_words(name: str, text: str) -> list[str]:
    """Split the value of a setting as a shell would, without a shell. Raises UserError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{name}={text!r} cannot be split into words: {error}") from None


def parse_switch(name: str, text: str) -> bool:
    """Read `1` as true, `0` or nothing as false. Raises UserError for anything else."""
    if text not in ("", "0", "1"):
        raise UserError(f"{name}={text!r} is neither 0 nor 1")
    return text == "1"


def split_arguments(text: str) -> tuple[list[str], list[str]]:
    """Split ARGS into words for the experiment and `cluster.key=value` words for the profile."""
    words = split_words("ARGS", text)
    for_profile = [word for word in words if re.match(r"cluster\.\w+=", word)]
    return [word for word in words if word not in for_profile], for_profile


def split_settings(text: str) -> tuple[list[str], list[str]]:
    """Split ARGS for a command without the options of an experiment. Raises UserError for an option."""
    words, for_profile = split_arguments(text)
    option = next((word for word in words if word.startswith("-")), None)
    if option:
        raise UserError(
            f"ARGS: {option} is no setting; write key=value here (make exp NAME=<experiment> ARGS=--help lists them)"
        )
    return words, for_profile
