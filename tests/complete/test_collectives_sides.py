"""collectives with the built-in backend as the run's own: every algorithm and transport, encrypted ones among them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from common.ranks import local_launcher
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import join_world
from common.techniques.collectives import measurement
from common.techniques.collectives.measurement import CollectiveOperation
from configs.collectives import ALGORITHMS, TRANSPORTS
from configs.shared import Launch
from tests.harness import warm
from tests.harness.processes import environment, run


def test_every_algorithm_through_every_transport_sends_what_its_moves_say(tmp_path: Path) -> None:
    sides = (f"algorithms=[{','.join(ALGORITHMS)}]", f"transports=[{','.join(TRANSPORTS)}]", "ops=[all_reduce]")
    arguments = ("processes_per_node=4", "sizes=[64K]", "dtypes=[float32,bfloat16]", "rounds=1", "plot=false")
    own = ("launch.backend=builtin", "launch.tls=true", "launch.algorithm=tree<100000<ring", "launch.threads=1")
    completed = run("collectives", *sides, *arguments, *own, "log.progress=none", runs=tmp_path)
    assert completed.status == 0, completed.err
    points = {(point["side"], point["dtype"]): point for point in completed.result["points"]}
    built_in = [f"{name}, {transport}" for transport in TRANSPORTS for name in ALGORITHMS]
    assert {side for side, _ in points} == {"builtin", "gloo", "isend ring", *built_in}
    for transport in TRANSPORTS:
        for dtype, vector in (("float32", 65536), ("bfloat16", 2 * 65536)):
            ring, star = (points[f"{name}, {transport}", dtype] for name in ("ring", "star"))
            assert ring["bytes_sent"] == [1.5 * vector] * 4
            assert star["bytes_sent"] == [3 * vector, *[vector] * 3]
            if transport != "memory":
                assert ring["interface_bytes"][0] > 1.5 * vector, "headers, and what other tests send"
    few, many = (sum(points["builtin", dtype]["bytes_sent"]) for dtype in ("float32", "bfloat16"))
    assert few == pytest.approx(6 * 65536, abs=64)
    assert many == pytest.approx(6 * 2 * 65536, abs=64), "barriers beside"
    assert points["gloo", "float32"]["bytes_sent"] == [0.0] * 4
    assert "builtin: sent 0.20 MB per rank" in completed.out, "the ring for the many bytes of bfloat16 as it travels"
    assert list(completed.result["links"]) == ["0 - 1", "1 - 2", "2 - 3", "3 - 0"]


def look_at_streams(place: RankInfo, folder: Path) -> None:
    """What carries the messages of each transport, and of a group that is made after them."""
    launch = Launch(backend="builtin", tls=True, transport="network")
    found: dict[str, dist.ProcessGroup] = {}
    with join_world(place, launch, folder / "private") as world:
        for transport in reversed(TRANSPORTS):

            def keep(group: dist.ProcessGroup, transport: str = transport) -> dict[str, CollectiveOperation]:
                found[transport] = group
                return {}

            measurement.open_builtin_variants(world, launch, transport, ["ring"], keep)
        found["later"] = measurement.create_group_of_all_ranks(world, "builtin")
        told = []
        for name, group in found.items():
            (link,) = measurement.get_communicator(group).outgoing.values()
            stream: Any = link.stream
            told.append(f"{name} {type(stream).__name__} {type(stream.socket).__name__}")
        if world.is_main:
            (folder / "told").write_text("\n".join(told))


def test_messages_go_through_what_the_transport_says(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.complete.test_collectives_sides", str(tmp_path)]
    completed = warm.execute(argv, env=environment())
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "told").read_text().splitlines() == [
        "tls TlsStream TlsSocket",
        "memory MemoryStream socket",
        "network SocketStream socket",
        "later TlsStream TlsSocket",
    ]


if __name__ == "__main__":
    given = Path(sys.argv[1])
    sys.exit(local_launcher.run_ranks(lambda place: look_at_streams(place, given), 2, 1, lambda: None))
