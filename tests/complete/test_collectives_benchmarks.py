"""Benchmarks of collectives: their times become tables and a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import collectives
from tests.benchmarks.measure import Number, Pace, interleave


@pytest.mark.usefixtures("forked")
def test_times_of_collectives_become_tables_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SIZES", ("sizes=[4,1K]", "rounds=2"))
    monkeypatch.setattr(collectives, "GOALS", {"ring, memory": {1024: 1.8}})
    monkeypatch.setattr(collectives, "ENCRYPTED", {1024: 2.3})
    sizes, gains, tls, *_ = collectives.PARTS  # the others need a local cluster
    by_size, compared, encrypted = (
        interleave(part.sides(tmp_path), Pace(1, 0, 60), lambda _: None) for part in (sizes, gains, tls)
    )
    (row,) = tls.table(encrypted).rows
    assert (row.what, row.bound) == ("ring, tls / ring, network, all_reduce, 1,024 bytes", 2.3)
    rows = {row.what: row.cells for row in sizes.table(by_size).rows}
    assert list(rows) == [f"{op}, {size} bytes" for op in ("sendrecv", "all_reduce") for size in ("4", "1,024")]
    assert all(isinstance(cell, Number) for cell in rows["all_reduce, 4 bytes"])
    assert [isinstance(cell, Number) for cell in rows["sendrecv, 4 bytes"]] == [True, False, True, True, False, False]
    few, fewest, many = gains.table(compared).rows
    assert (few.what, few.bound, few.at_least) == ("ring, memory / gloo, all_reduce, 4 bytes", 1.3, False)
    assert (fewest.what, fewest.bound) == ("halving_doubling, memory / gloo, all_reduce, 4 bytes", 1.3)
    assert (many.what, many.bound, many.at_least) == ("gloo / ring, memory, all_reduce, 1,024 bytes", 1.8, True)
    found = compared.values["run"]
    gloo, ring = (found[f"all_reduce, 1,024 bytes: {side}"][0] for side in ("gloo", "ring, memory"))
    assert isinstance(many.cells[0], Number)
    assert many.cells[0].value == pytest.approx(gloo / ring, rel=1e-5)
    collectives.draw_collectives(tmp_path / "times.svg", {"samples": by_size.values})
    assert "star, memory, fitted" in (tmp_path / "times.svg").read_text()
