"""Generations of an elastic run: which ranks it lost and got back, as generations.json of an attempt tells it.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.runs.folder import Folder

FILE = "generations.json"


def describe_generation(change: Mapping[str, Any]) -> str:
    """Describe a change of ranks in a line."""
    words = [f"{word} rank {', '.join(map(str, change[word]))}" for word in ("lost", "joined") if change[word]]
    left = f"ranks {', '.join(map(str, change['ranks']))} go on after {change['seconds']:.3f} s"
    place = f"attempt {change['attempt']}, step" if "attempt" in change else "step"
    return f"after {place} {change['step']}: {'; '.join(words) or 'connections failed'}; {left}"


def read_generations(attempt: Folder) -> list[dict[str, Any]]:
    """Read the changes of an attempt's ranks; none where the file is missing or cut off."""
    try:
        return list(json.loads((attempt.attempt / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return []


def read_earlier_generations(attempt: Folder) -> list[dict[str, Any]]:
    """Read the changes of ranks in the attempts before this one, each with its attempt; none of a damaged file."""
    found = []
    for earlier in attempt.attempts():
        if earlier.number >= attempt.number:
            break
        try:
            changes = [{"attempt": earlier.number} | change for change in read_generations(earlier)]
            for change in changes:
                describe_generation(change)
                float(change["discarded"])
        except (TypeError, ValueError, LookupError):
            continue
        found += changes
    return found


def describe_generations(attempt: Folder) -> list[str]:
    """Describe the changes of an attempt's ranks; none where the file is damaged."""
    try:
        return [describe_generation(change) for change in read_generations(attempt)]
    except (TypeError, ValueError, LookupError):
        return []
