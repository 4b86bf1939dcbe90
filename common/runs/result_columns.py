"""Columns of a result for tables and the W&B summary. This module does not import torch."""

from __future__ import annotations

from typing import Any

from common.runs.result import Result

FAILURE_COLUMNS = ("reason", "last_step", "cause")  # columns that only the result of an unfinished run has


def list_columns(result: Result) -> dict[str, Any]:
    """Return the numbers and strings of a result for tables and the W&B summary.

    Each element of a list becomes a separate column.
    """
    columns: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for name, content in result.flatten_values().items():
        if isinstance(content, str):
            columns[name] = str(content)  # W&B would log the name of a member of Cause instead of its text
        elif isinstance(content, int | float):
            columns[name] = content
        elif isinstance(content, list):
            lists[name] = content
    lists["peak_memory"] = list(result.memory.values())
    for name, numbers in lists.items():
        if all(isinstance(number, int | float) for number in numbers):
            columns |= {f"{name}_{position}": number for position, number in enumerate(numbers)}

    derived = {"waiting": result.compute_waiting_share(), "memory_mb": result.find_peak_mb()}
    return columns | {name: number for name, number in derived.items() if number is not None}


def list_summary_columns(result: Result, restarts: int) -> dict[str, Any]:
    """Return the columns of a result for the W&B summary of a run that was restarted `restarts` times.

    W&B keeps the summary of earlier attempts. Columns of an earlier failure that the result lacks are therefore None.
    """
    cleared = dict.fromkeys(FAILURE_COLUMNS) if restarts else {}
    return cleared | list_columns(result) | {"restarts": restarts}
