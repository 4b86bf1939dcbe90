"""Columns of the table of `make compare`: values, formats, headings and sorting. This module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from common.runs import result as results
from common.runs.compare.compare_page import TableCell
from common.runs.compare.setting_labels import MISSING, format_setting_head
from common.system.errors import UserError
from common.system.text import format_duration
from slurm.arguments import suggest_nearest
from slurm.reports.compared_runs import RunGroup
from slurm.reports.selection import LEARNING_RATE, matches_short_name, parse_float

COLUMN_FORMATS = {
    "test_accuracy": "{:.2%}",
    "samples_per_second": "{:,.0f}",
    "test_loss": "{:.4f}",
    "step": "{:.0f}",
    "loss": "{:.4f}",
    "efficiency": "{:.0%}",
    "waiting": "{:.0%}",
    "memory_mb": "{:,.0f}",
    "processes": "{:.0f}",
    "restarts": "{:.0f}",
    "split_at": "{}",
    "shards": "{}",
    "ranks_lost": "{:.0f}",
    "seconds_lost": "{:.2f}",
    "steps_redone": "{:.0f}",
    "duration": "",  # has a unit that depends on the value
    "start": "{}",
}
"""Format string for the values of each table column, by column name. The most informative columns come first."""
TEXT_COLUMNS = ("run", "state", "experiment")  # columns by which the table can be sorted, but which have no numbers
COLUMN_HEADS = {
    "samples_per_second": "samples/s",
    "test_accuracy": "accuracy",
    "loss": "final loss",
    "processes": "ranks",
    "memory_mb": "peak MB",  # highest peak memory of any rank
    "shards": "shard sizes",  # the setting `shards` has its own column
}
"""Headings of columns, by column name. The heading of any other column is the column name."""


def format_column_head(name: str) -> str:
    """Return the heading of the table column with this name."""
    return COLUMN_HEADS.get(name, name.replace("_", " "))


def format_value(name: str, value: Any) -> str:
    """Return a value of a column as text."""
    if name == "duration":
        return format_duration(value)
    return COLUMN_FORMATS.get(name, "{:.4g}").format(value)


def make_cell(name: str, values: list[Any]) -> TableCell:
    """Return the table cell of one or more runs, whose values in the column `name` are `values`.

    Several different numbers are shown as their mean and range, as in `0.5 [0.4..0.6]`.
    """
    texts = list(dict.fromkeys(format_value(name, value) for value in values))
    if not texts:
        return TableCell(MISSING)
    numbers = [results.to_finite_number(value) for value in values]
    if None in numbers:
        return TableCell(",".join(texts))
    mean = fmean(number for number in numbers if number is not None)
    if len(texts) == 1:
        return TableCell(texts[0], mean)
    spread = f"{format_value(name, min(values))}..{format_value(name, max(values))}"
    return TableCell(f"{format_value(name, mean)} [{spread}]", mean)


def list_nonempty_columns(groups: list[RunGroup]) -> list[str]:
    """Return the names of the columns in which at least one run has a value.

    The column `restarts` is included only if at least one run was restarted.
    """
    names = []
    for name in COLUMN_FORMATS:
        values: list[Any] = []
        for group in groups:
            values += group.list_values(name)
        if values and (name != "restarts" or any(values)):
            names.append(name)
    return names


def sort_groups(groups: list[RunGroup], key: str) -> list[RunGroup]:
    """Return the groups of runs, sorted by a column. `key` is the name of a column, a setting or a metric.

    The order is ascending, or descending if `key` starts with a minus sign. Runs without a value come last. Raises
    UserError if no run has such a column.
    """
    is_descending = key.startswith("-")
    name = find_sort_column(groups, key.removeprefix("-"))
    cells = {id(group): make_sort_cell(group, name) for group in groups}
    with_value = [group for group in groups if cells[id(group)].text != MISSING]

    def get_sort_key(group: RunGroup) -> tuple[bool, float, str]:
        cell = cells[id(group)]
        return cell.value is None, cell.value or 0.0, cell.text

    with_value.sort(key=get_sort_key, reverse=is_descending)
    return with_value + [group for group in groups if cells[id(group)].text == MISSING]


def find_sort_column(groups: list[RunGroup], name: str) -> str:
    """Return the name of the column, setting or metric that SORT names, by its name, heading or short name.

    Raises UserError if no run has it.
    """
    keys = [*TEXT_COLUMNS, "label", *COLUMN_FORMATS]
    for group in groups:
        keys += [*group.settings, *group.list_metrics()]
    keys = list(dict.fromkeys(keys))
    heads = {re.sub("[^a-z0-9]+", "_", format_setting_head(key)): key for key in keys}
    heads |= {format_column_head(key): key for key in keys}
    matches = [key for key in keys if key == name] or [key for key in keys if matches_short_name(name, key)]
    if matches or name in heads:
        return matches[0] if matches else heads[name]
    hint = suggest_nearest(name, [*keys, *heads]) or f"; use, for example, {', '.join(list_examples(keys))}"
    raise UserError(f"SORT={name!r}: no column, setting or metric has this name{hint}")


def list_examples(keys: Iterable[str]) -> list[str]:
    """Return names that SORT accepts, for an error message."""
    return [key for key in ("test_accuracy", "-loss", "start", LEARNING_RATE) if key.removeprefix("-") in keys]


def make_sort_cell(group: RunGroup, name: str) -> TableCell:
    """Return the cell by which a group of runs is sorted."""
    if name == "label":
        return TableCell(group.label)
    if name in TEXT_COLUMNS:
        return TableCell(",".join(dict.fromkeys(str(value) for value in group.list_values(name))))
    if name in group.runs[0].table_row:
        return make_cell(name, group.list_values(name))
    if name in group.settings:
        return TableCell(group.settings[name], parse_float(group.settings[name]))
    return make_cell(name, group.list_metric_values(name))
