"""Benchmarks of collectives: their times become tables and a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import collectives
from tests.benchmarks.measure import Number, Pace, Samples, interleave
from tests.benchmarks.parts import Part


def measure(part: Part, folder: Path) -> Samples:
    return interleave(part.sides(folder), Pace(1, 0, 60), lambda _: None)


@pytest.mark.drawn
@pytest.mark.usefixtures("forked")
def test_times_of_collectives_become_tables_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SIZES", ("sizes=[4,1K]", "rounds=2"))
    monkeypatch.setattr(collectives, "GOALS", {"ring, memory": {1024: 1.8}})
    monkeypatch.setattr(collectives, "MAX_ENCRYPTED_SLOWDOWNS", {1024: 2.3})
    sizes, gains, tls, *_ = collectives.PARTS  # the others need a local cluster
    by_size = measure(sizes, tmp_path)
    compared = measure(gains, tmp_path)
    encrypted = measure(tls, tmp_path)
    (row,) = tls.table(encrypted).rows
    assert (row.what, row.bound) == ("ring, tls / ring, network, all_reduce, 1,024 bytes", 2.3)
    rows = {row.what: row.cells for row in sizes.table(by_size).rows}
    names = ["sendrecv, 4 bytes", "sendrecv, 1,024 bytes", "all_reduce, 4 bytes", "all_reduce, 1,024 bytes"]
    assert list(rows) == names
    assert all(isinstance(cell, Number) for cell in rows["all_reduce, 4 bytes"])
    assert [isinstance(cell, Number) for cell in rows["sendrecv, 4 bytes"]] == [True, False, True, True, False, False]
    ring_4, halving_4, ring_1024 = gains.table(compared).rows
    assert (ring_4.what, ring_4.bound, ring_4.at_least) == ("ring, memory / gloo, all_reduce, 4 bytes", 1.3, False)
    assert (halving_4.what, halving_4.bound) == ("halving_doubling, memory / gloo, all_reduce, 4 bytes", 1.3)
    assert ring_1024.what == "gloo / ring, memory, all_reduce, 1,024 bytes"
    assert ring_1024.bound == 1.8
    assert ring_1024.at_least is True
    times = compared.values["run"]
    gloo = times["all_reduce, 1,024 bytes: gloo"][0]
    ring = times["all_reduce, 1,024 bytes: ring, memory"][0]
    gain = ring_1024.cells[0]
    assert isinstance(gain, Number)
    assert gain.value == pytest.approx(gloo / ring, rel=1e-5)
    figure = tmp_path / "times.svg"
    collectives.draw_collectives(figure, {"samples": by_size.values})
    assert "star, memory, fitted" in figure.read_text()
