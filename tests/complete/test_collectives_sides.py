"""The experiment collectives on the built-in backend: every algorithm and transport, also encrypted."""

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
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment, run_experiment

VECTOR_BYTES = {"float32": 65536, "bfloat16": 2 * 65536}


def test_every_algorithm_sends_the_expected_bytes_through_every_transport(tmp_path: Path) -> None:
    sides = (f"algorithms=[{','.join(ALGORITHMS)}]", f"transports=[{','.join(TRANSPORTS)}]", "ops=[all_reduce]")
    arguments = ("processes_per_node=4", "sizes=[64K]", "dtypes=[float32,bfloat16]", "rounds=1", "plot=false")
    launch = ("launch.backend=builtin", "launch.tls=true", "launch.algorithm=tree<100000<ring", "launch.threads=1")
    completed = run_experiment("collectives", *sides, *arguments, *launch, "log.progress=none", runs=tmp_path)
    points = {(point["side"], point["dtype"]): point for point in completed.result["points"]}
    expected_sides = {"builtin", "gloo", "isend ring"}
    for transport in TRANSPORTS:
        expected_sides |= {f"{name}, {transport}" for name in ALGORITHMS}
    assert {side for side, _ in points} == expected_sides
    for transport in TRANSPORTS:
        for dtype, vector_bytes in VECTOR_BYTES.items():
            ring = points[f"ring, {transport}", dtype]
            star = points[f"star, {transport}", dtype]
            assert ring["bytes_sent"] == [1.5 * vector_bytes] * 4
            assert star["bytes_sent"] == [3 * vector_bytes, vector_bytes, vector_bytes, vector_bytes]
            if transport != "memory":  # headers and the traffic of other tests are counted, too
                assert ring["interface_bytes"][0] > 1.5 * vector_bytes
    for dtype, vector_bytes in VECTOR_BYTES.items():  # barriers send a few bytes more
        assert sum(points["builtin", dtype]["bytes_sent"]) == pytest.approx(6 * vector_bytes, abs=64)
    assert points["gloo", "float32"]["bytes_sent"] == [0.0] * 4
    assert "builtin: sent 0.20 MB per rank" in completed.stdout, "bfloat16 has more bytes and uses the ring"
    assert list(completed.result["links"]) == ["0 - 1", "1 - 2", "2 - 3", "3 - 0"]


def write_streams(rank_info: RankInfo, folder: Path) -> None:
    """Write the classes that carry the messages of each transport, and of a group that is created after them."""
    launch = Launch(backend="builtin", tls=True, transport="network")
    groups: dict[str, dist.ProcessGroup] = {}
    with join_world(rank_info, launch, folder / "private") as world:
        for transport in reversed(TRANSPORTS):

            def keep(group: dist.ProcessGroup, transport: str = transport) -> dict[str, CollectiveOperation]:
                groups[transport] = group
                return {}

            measurement.open_builtin_variants(world, launch, transport, ["ring"], keep)
        groups["later"] = measurement.create_group_of_all_ranks(world, "builtin")
        lines = []
        for name, group in groups.items():
            (link,) = measurement.get_communicator(group).outgoing.values()
            stream: Any = link.stream
            lines.append(f"{name} {type(stream).__name__} {type(stream.socket).__name__}")
        if world.is_main:
            (folder / "streams").write_text("\n".join(lines))


def test_each_transport_uses_its_stream(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.complete.test_collectives_sides", str(tmp_path)]
    execution.execute_command(argv, env=make_environment(), status=0)
    assert (tmp_path / "streams").read_text().splitlines() == [
        "tls TlsStream TlsSocket",
        "memory MemoryStream socket",
        "network SocketStream socket",
        "later TlsStream TlsSocket",
    ]


if __name__ == "__main__":
    output_folder = Path(sys.argv[1])
    sys.exit(local_launcher.run_ranks(lambda info: write_streams(info, output_folder), 2, 1, lambda: None))
