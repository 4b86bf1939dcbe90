"""Rank changes of an elastic run: the ranks that were lost and the ranks that joined.

Each attempt stores its rank changes in generations.json. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.runs.folder import RunFolder
from common.runs.result import Report, ReportData
from common.runs.run_progress import GENERATIONS_FILE
from common.system.text import format_count, format_ranks


def describe_rank_change(change: Mapping[str, Any]) -> str:
    """Describe a rank change in one line."""
    attempt = f"attempt {change['attempt']}, " if "attempt" in change else ""
    events = [f"{kind} {format_ranks(change[kind])}" for kind in ("lost", "joined") if change[kind]]
    return (
        f"after {attempt}step {change['step']}: {'; '.join(events) or 'connections failed'}; "
        f"{format_ranks(change['ranks'])} continued after {change['seconds']:.3f} s"
    )


def read_rank_changes(attempt: RunFolder) -> list[dict[str, Any]]:
    """Read the rank changes of an attempt. The list is empty if the file is missing or damaged."""
    try:
        return list(json.loads((attempt.attempt_folder / GENERATIONS_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return []


def list_remaining_ranks(attempt: RunFolder) -> list[int] | None:
    """Return the ranks of an attempt after its last rank change.

    Returns None if the ranks have not changed or the file is damaged.
    """
    try:
        return [int(rank) for rank in read_rank_changes(attempt)[-1]["ranks"]]
    except (TypeError, ValueError, LookupError):
        return None


def read_earlier_rank_changes(attempt: RunFolder) -> list[dict[str, Any]]:
    """Read the rank changes of all earlier attempts, and add the attempt number to each change.

    Damaged files are skipped.
    """
    all_changes = []
    for earlier in attempt.list_attempts():
        if earlier.number >= attempt.number:
            break
        try:
            changes = [{"attempt": earlier.number} | change for change in read_rank_changes(earlier)]
            for change in changes:
                describe_rank_change(change)
                float(change["discarded"])
        except (TypeError, ValueError, LookupError):
            continue
        all_changes += changes
    return all_changes


def describe_rank_changes(attempt: RunFolder) -> list[str]:
    """Describe the rank changes of an attempt. The list is empty if the file is damaged."""
    try:
        return [describe_rank_change(change) for change in read_rank_changes(attempt)]
    except (TypeError, ValueError, LookupError):
        return []


def report_rank_changes(changes: Sequence[dict[str, Any]]) -> list[Report]:
    """Report the ranks that an elastic run lost and regained, and the lost time.

    Returns an empty list if the ranks did not change.
    """
    if not changes:
        return []
    seconds_lost = sum(change["seconds"] + change["discarded"] for change in changes)
    steps_redone = sum(1 for change in changes if change["discarded"] > 0)
    lines = [describe_rank_change(change) for change in changes]
    lines.append(f"{seconds_lost:.3f} s lost in total, {format_count(steps_redone, 'step')} repeated")
    measured = {
        "generations": list(changes),
        "seconds_lost": seconds_lost,
        "steps_redone": steps_redone,
        "ranks_lost": sum(len(change["lost"]) for change in changes),
    }
    return [ReportData({"ranks lost": "\n".join(lines)}, measured=measured)]
