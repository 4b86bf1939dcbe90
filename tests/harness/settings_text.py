"""Read settings of runs that are written as on a command line."""

from __future__ import annotations


def split_settings(text: str) -> tuple[str, ...]:
    """Return the settings of a text, which spaces and line breaks separate."""
    return tuple(text.split())


def split_cases(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the settings of each line of a text, without empty lines."""
    lines = text.strip().splitlines()
    return tuple(map(split_settings, lines))
