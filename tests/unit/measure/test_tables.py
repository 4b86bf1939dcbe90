"""Tables of text."""

from __future__ import annotations

from common.measure import tables


def test_lines_of_a_value_stay_in_its_column() -> None:
    table = tables.format_table({"a": "1", "long name": "2\n3"})
    assert table == "  a          1\n  long name  2\n             3"
