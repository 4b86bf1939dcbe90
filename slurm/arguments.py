"""Parsers for command arguments: names, counts, switches, and lists. This module does not import torch."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable

from common.system.errors import UserError

EXPERIMENT_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def check_experiment_name(name: str) -> str:
    """Return `name` if an experiment with this name exists.

    Otherwise, raises UserError, which suggests the most similar name.
    """
    from common.config import config  # deferred: it imports OmegaConf, which the local cluster does not need

    experiments = config.list_experiments()
    listing = f"(experiments: {', '.join(experiments)})"
    if not name:
        raise UserError(f"NAME is missing; run, for example, make exp NAME={experiments[0]} {listing}")
    if not EXPERIMENT_NAME.fullmatch(name) or name not in experiments:
        raise UserError(f"unknown experiment {name!r}{suggest_nearest(name, experiments)} {listing}")
    return name


def suggest_nearest(word: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean X?` for the most similar candidate, or "" if no candidate is similar."""
    matches = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def parse_count(name: str, text: str, maximum: int = 99_999, *, minimum: int = 1) -> int:
    """Parse an integer from `minimum` to `maximum`. Raises UserError for any other text."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not minimum <= int(text) <= maximum:
        raise UserError(f"{name} must be an integer from {minimum} to {maximum} (got {text!r})")
    return int(text)


def split_words(name: str, text: str) -> list[str]:
    """Split the value of a setting into words as a shell does, but without expanding variables or patterns.

    Raises UserError if a quotation mark is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        remedy = "close each quotation mark, and omit a backslash at the end"
        raise UserError(f"{name}={text!r} cannot be split into words: {error}; {remedy}") from None


def parse_zero_or_one(name: str, text: str) -> bool:
    """Return True for `1`, and False for `0` or an empty string. Raises UserError for other values."""
    if text not in ("", "0", "1"):
        raise UserError(f"{name} must be 0 or 1 (got {text!r})")
    return text == "1"


def split_experiment_and_cluster_arguments(text: str) -> tuple[list[str], list[str]]:
    """Split ARGS into arguments of the experiment and `cluster.key=value` arguments of the cluster profile."""
    arguments = split_words("ARGS", text)
    for_profile = [argument for argument in arguments if re.match(r"cluster\.\w+=", argument)]
    return [argument for argument in arguments if argument not in for_profile], for_profile


def split_experiment_and_cluster_settings(text: str) -> tuple[list[str], list[str]]:
    """Split ARGS into the settings of a run and the settings of a cluster profile.

    Raises UserError if ARGS contains a command-line option.
    """
    arguments, for_profile = split_experiment_and_cluster_arguments(text)
    reject_options(arguments)
    return arguments, for_profile


def reject_options(arguments: Iterable[str]) -> None:
    """Raise UserError if one of the arguments of an experiment is a command-line option instead of a setting."""
    for argument in arguments:
        if argument.startswith("-"):
            raise UserError(
                f"ARGS: {argument} is not a setting; expected key=value "
                "(make exp NAME=<experiment> ARGS=--help lists all settings)"
            )
