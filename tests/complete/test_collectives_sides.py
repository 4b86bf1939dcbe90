"""collectives with the built-in backend as the run's own: every algorithm and transport, encrypted ones among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.collectives import ALGORITHMS, TRANSPORTS
from tests.harness.processes import run


def test_every_algorithm_through_every_transport_sends_what_its_moves_say(tmp_path: Path) -> None:
    sides = (f"algorithms=[{','.join(ALGORITHMS)}]", f"transports=[{','.join(TRANSPORTS)}]", "ops=[all_reduce]")
    words = ("processes_per_node=4", "sizes=[64K]", "dtypes=[float32,bfloat16]", "rounds=1", "plot=false")
    own = ("launch.backend=builtin", "launch.tls=true", "launch.algorithm=tree<100000<ring", "launch.threads=1")
    done = run("collectives", *sides, *words, *own, "log.progress=none", runs=tmp_path)
    assert done.status == 0, done.err
    points = {(point["side"], point["dtype"]): point for point in done.result["points"]}
    built_in = [f"{name}, {transport}" for transport in TRANSPORTS for name in ALGORITHMS]
    assert {side for side, _ in points} == {"builtin", "gloo", "isend ring", *built_in}
    for transport in TRANSPORTS:
        for dtype, vector in (("float32", 65536), ("bfloat16", 2 * 65536)):
            ring, star = (points[f"{name}, {transport}", dtype] for name in ("ring", "star"))
            assert ring["bytes_sent"] == [1.5 * vector] * 4 and star["bytes_sent"] == [3 * vector, *[vector] * 3]
            if transport != "memory":
                assert ring["interface_bytes"][0] > 1.5 * vector, "headers, and what other tests send"
    few, many = (sum(points["builtin", dtype]["bytes_sent"]) for dtype in ("float32", "bfloat16"))
    assert few == pytest.approx(6 * 65536, abs=64) and many == pytest.approx(6 * 2 * 65536, abs=64), "barriers beside"
    assert points["gloo", "float32"]["bytes_sent"] == [0.0] * 4
    assert "builtin: MB sent 0.20 by each rank" in done.out, "the ring for the many bytes of bfloat16 as it travels"
    assert list(done.result["links"]) == ["0 - 1", "1 - 2", "2 - 3", "3 - 0"]
