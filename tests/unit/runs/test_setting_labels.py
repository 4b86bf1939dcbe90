"""common/runs/compare/setting_labels.py and compare_table.py: what tells runs apart, and how much of it fits a line."""

from __future__ import annotations

from common.runs.compare import setting_labels
from common.runs.compare.compare_table import Column, choose_columns, join_columns, shorten_text


def test_the_settings_of_the_method_come_first_and_repeat_nothing() -> None:
    runs = [
        {"seed": f"{i}", "optim.lr": f"{i // 2}", "optim.base_batch": f"{i // 2}", "strategy": f"{i % 2}"}
        for i in range(4)
    ]
    for i, run in enumerate(runs):
        run |= {"checkpoint.every_seconds": f"{i}", "log.level": f"{i}", "runs": f"{i}"}
    differing = setting_labels.sort_differing_settings(runs)
    assert differing == ["strategy", "optim.lr", "optim.base_batch", "seed", "checkpoint.every_seconds"]
    assert setting_labels.choose_distinctive_settings(runs, 3) == [
        "strategy",
        "optim.lr",
    ]  # with these, all four are told apart
    assert setting_labels.choose_distinctive_settings(runs, 1) == ["strategy"]
    assert setting_labels.choose_distinctive_settings(runs[:1], 3) == []


def test_names_are_short_where_that_is_clear() -> None:
    runs = [{"optim.lr": "1", "optim.name": "sgd", "steps": "3", "profile.steps": "4"}]
    assert setting_labels.shorten_keys(list(runs[0]), runs) == ["lr", "optim.name", "steps", "profile.steps"]


def test_columns_that_fit_are_kept_in_their_order() -> None:
    columns = [
        Column("run", ["a", "bb"], is_left_aligned=True),
        Column("wide", ["x" * 30, "-"]),
        Column("n", ["1", "22"]),
    ]
    chosen = choose_columns(columns, 10)
    assert join_columns(chosen) == ["run   n", "a     1", "bb   22"]
    assert choose_columns(columns, 39) == columns and choose_columns(columns, 1) == columns[:1]
    assert shorten_text("x" * 24) == "x" * 24 and shorten_text("x" * 25) == "x" * 23 + "…"
