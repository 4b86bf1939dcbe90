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
    return f"after step {change['step']}: {'; '.join(words) or 'connections failed'}; {left}"


def read_generations(attempt: Folder) -> list[dict[str, Any]]:
    """Read the changes of an attempt's ranks; none where the file is missing or cut off."""
    try:
        return list(json.loads((attempt.attempt / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return []


def describe_generations(attempt: Folder) -> list[str]:
    """Describe the changes of an attempt's ranks; none where the file is damaged."""
    try:
        return [describe_generation(change) for change in read_generations(attempt)]
    except (TypeError, ValueError, LookupError):
        return []
