"""Dataclass fields for numbers within a range, paths, custom code, automatic choices, and groups of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

G = TypeVar("G")
MAX_NOTES_LENGTH = 1000
"""Maximum length of the notes about a run, in characters."""


def at_least(low: float, default: float, only: str = "") -> Any:
    """Define a dataclass field for a number that is at least `low`.

    `only` names the setting that makes the field effective, such as `mode=sync`.
    """
    return field(default=default, metadata={"low": low, "only": only})


def between(low: float, high: float, default: float, only: str = "") -> Any:
    """Define a dataclass field for a number from `low` to `high`.

    `only` has the same meaning as in `at_least`.
    """
    return field(default=default, metadata={"low": low, "high": high, "only": only})


def file_path(default: str) -> Any:
    """Define a dataclass field for the path of a file or folder.

    The value `none` means that there is no such file.
    """
    return field(default=default, metadata={"is_path": True})


def short_text(length: int) -> Any:
    """Define a dataclass field for printable text in one line with at most `length` characters."""
    return field(default="", metadata={"check_text": partial(check_short_text, length)})


def check_short_text(length: int, text: str) -> None:
    """Raise ValueError if text has more than `length` characters or contains a character that cannot be printed."""
    if len(text) > length:
        raise ValueError(f"{len(text)} characters are too many; use at most {length}")
    if not text.isprintable():
        raise ValueError("line breaks and other characters that cannot be printed are not allowed")


def custom_code(
    default: str, kind: str, checker: str, *, choices: tuple[str, ...] = (), rank_0_only: bool = False
) -> Any:
    """Define a dataclass field whose value may be `FILE.py:name`.

    `kind` is the kind of code that the file defines, such as `schedule`. `checker` is the import path
    `module:function` of a function that takes the config and raises UserError if a value other than the default is
    invalid. `choices` lists the other valid values, and at the end the form of a custom value, such as `FILE.py:Class`;
    if `choices` is empty, the config checks the value. With `rank_0_only`, only rank 0 reads the file.
    """
    code = {"kind": kind, "checker": checker, "rank_0_only": rank_0_only}
    return field(default=default, metadata={"custom_code": code, "choices": choices})


def chosen_from(*keys: str) -> Any:
    """Define a dataclass field for a list that the run chooses if the list is empty.

    The choice depends on the settings `keys`. A resumed run keeps its choice unless one of these settings changes.
    """
    return field(default_factory=list, metadata={"chosen_from": keys})


def flat(group: Callable[[], Any]) -> Any:
    """Define a dataclass field for a group of settings whose keys have no prefix.

    For example, the key of `cfg.sharding.shards` is `shards`. Without `flat`, the key would be `sharding.shards`.
    """
    return field(default_factory=group, metadata={"is_flat": True})


def find_group(cfg: Any, group: type[G]) -> G | None:
    """Return the group of settings of the class `group` in a config, or None if the config has none."""
    for group_field in fields(cfg) if is_dataclass(cfg) else ():
        value = getattr(cfg, group_field.name)
        if isinstance(value, group):
            return value
    return None
