"""The table of runs fits the width of a terminal."""

from __future__ import annotations

from common.runs.compare.compare_table import Column, choose_columns, join_columns, shorten_text

RUN = Column("run", ["a", "bb"], is_left_aligned=True)
WIDE = Column("wide", ["x" * 30, "-"])
NUMBER = Column("n", ["1", "22"])


def test_columns_that_fit_keep_their_order() -> None:
    columns = [RUN, WIDE, NUMBER]
    assert join_columns(choose_columns(columns, 10)) == ["run   n", "a     1", "bb   22"]
    assert choose_columns(columns, 39) == columns
    assert choose_columns(columns, 1) == [RUN]


def test_long_text_is_shortened() -> None:
    assert shorten_text("x" * 24) == "x" * 24
    assert shorten_text("x" * 25) == "x" * 23 + "…"
    assert shorten_text("/home/user/experiments/focal.py:focal_loss") == "focal.py:focal_loss"
