"""Read what `make doctor` has found."""

from __future__ import annotations

from collections.abc import Sequence


def leave_out_speed_problems(problems: Sequence[str]) -> list[str]:
    """Return the problems that other programs on this machine cannot cause."""
    speed_phrases = (" is slow: ", "writes run folders at only")
    return [problem for problem in problems if not any(phrase in problem for phrase in speed_phrases)]
