"""collectives: formulas of the table, exact results in rings of any length, resuming, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.backend.algorithms import build_algorithms_by_size
from common.backend.cost import MessageTimeLine
from common.config import config
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder, write_json
from common.system.errors import UserError
from common.system.processes import count_host_cores
from common.techniques.collectives.measurement import (
    BenchmarkVectors,
    CollectivePoint,
    CollectiveVariant,
    compute_bus_factor,
    compute_sent_bytes,
    list_benchmark_points,
)
from common.techniques.collectives.report import CollectiveReport
from configs.collectives import OPS, Config
from experiments import collectives as script
from slurm.launch import rerun
from tests.harness import inside
from tests.harness.processes import run, values_of
from tests.harness.registry import BY_NAME
from tests.harness.resuming import cut_off, resume, trained_steps

COLLECTIVES = BY_NAME["collectives"]
OTHER = CollectiveVariant({})
GLOO = {
    "gloo": OTHER,
    "isend ring": CollectiveVariant({}, algorithms=build_algorithms_by_size("ring", 2), link_variant="gloo"),
}


# ---- formulas


@pytest.mark.parametrize(
    ("op", "bus", "least"),
    [
        ("sendrecv", 1.0, 8.0),
        ("broadcast", 1.0, 6.0),
        ("all_reduce", 1.5, 12.0),
        ("reduce_scatter", 0.75, 6.0),
        ("all_gather", 0.75, 6.0),
    ],
)
def test_factors_of_four_ranks_are_those_of_nccl_tests(op: str, bus: float, least: float) -> None:
    assert compute_bus_factor(op, 4) == bus
    assert compute_sent_bytes(CollectivePoint(op, "float32", 2, 8), OTHER, 4) == [least] * 4


def test_bytes_of_an_algorithm_are_those_of_its_moves() -> None:
    star = CollectiveVariant({}, algorithms=build_algorithms_by_size("star<1000<ring", 3), widens_half_precision=True)
    assert compute_sent_bytes(CollectivePoint("all_reduce", "float32", 100, 400), star, 3) == [800, 400, 400]
    assert compute_sent_bytes(CollectivePoint("all_reduce", "bfloat16", 200, 400), star, 3) == [1600, 800, 800]
    assert compute_sent_bytes(CollectivePoint("all_reduce", "bfloat16", 300, 600), star, 3) == [1600] * 3, (
        "1,200 bytes travel"
    )
    assert compute_sent_bytes(CollectivePoint("broadcast", "bfloat16", 150, 300), star, 3) == [200] * 3


def test_sizes_are_rounded_up_to_equal_shards_where_there_are_shards() -> None:
    points = list_benchmark_points(["all_reduce", "all_gather"], ["float32", "int64"], [8, 1024], 3)
    assert [(p.name, p.length, p.nbytes) for p in points] == [
        ("all_reduce float32", 2, 8),
        ("all_reduce float32", 256, 1024),
        ("all_reduce int64", 1, 8),
        ("all_reduce int64", 128, 1024),
        ("all_gather float32", 3, 12),
        ("all_gather float32", 258, 1032),
        ("all_gather int64", 3, 24),
        ("all_gather int64", 129, 1032),
    ]


def test_the_table_of_known_times() -> None:
    """Links of 100 us and 1 GB/s, an all-reduce of twice that; the second rank is the slower one."""
    points = list_benchmark_points(["sendrecv", "all_reduce"], ["float32"], [4000, 4_000_000], 2)
    table = torch.zeros(3, len(points), 2, 2, 3, dtype=torch.float64)
    for i, point in enumerate(points):
        seconds = 1e-4 + 1e-9 * point.nbytes
        for number, factor in enumerate((1.0, 0.5, 5.0)):  # the median round comes first
            times = (2 if point.op == "all_reduce" else 1) * factor * seconds
            table[number, i, 0] = torch.tensor([[0.9 * times, 0, point.nbytes], [times, 0, point.nbytes]])
    table[2, 3] = 0  # the run ended before
    table[0, 2:, 1] = torch.tensor([5e-3, 6e6, 100])
    report = CollectiveReport(points, GLOO, table, {"0 - 1": MessageTimeLine(2e-5, 0)})
    found = report.result()
    assert found.outcome == {"exact_results": 13} and len(found.measured["points"]) == 6
    small, large = found.measured["points"][2::2]
    assert small["side"] == "gloo" and (small["bytes"], small["seconds"]) == (4000, pytest.approx(2 * 1.04e-4))
    assert [small[key] / small["seconds"] for key in ("least", "most")] == pytest.approx([0.5, 5])
    assert large["seconds"] == pytest.approx(0.75 * 2 * 4.1e-3), "of two rounds the mean"
    assert large["bytes_per_second"] == pytest.approx(4e6 / large["seconds"]) == large["bus_bytes_per_second"]
    line = found.measured["lines"]["sendrecv float32 gloo"]
    assert (line["alpha"], line["beta"]) == (pytest.approx(1e-4), pytest.approx(1e-9))
    shown = report.rows()
    assert "gloo: 100.0 us + bytes / 1 GB/s\n" in shown["sendrecv float32"] + "\n"
    assert "4,200.0 us predicted from link speeds for the largest size" in shown["all_reduce float32"]
    assert shown["links"] == "ranks 0 - 1: 20.0 us for any size"
    assert shown["bytes sent"].splitlines()[-2:] == [
        f"all_reduce float32, 4,000,000 bytes, {side}: {counted} MB per rank; computed 4.00 MB per rank"
        for side, counted in (("gloo", "through the network interface 4.00"), ("isend ring", "sent 6.00"))
    ]


def test_one_size_has_no_line_and_no_measured_point_is_left_out() -> None:
    points = list_benchmark_points(["all_reduce"], ["float32"], [4, 8], 2)
    table = torch.zeros(1, 2, 1, 2, 3, dtype=torch.float64)
    table[0, 0, 0, :, 0] = 1e-3
    report = CollectiveReport(points, {"gloo": OTHER}, table)
    assert report.fit_lines() == {} and len(report.cells) == 1
    assert report.rows()["bytes sent"] == "unknown"


# ---- results


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_number_is_found_and_named(op: str) -> None:
    vectors, (point,) = (
        BenchmarkVectors(0, RankInfo(1, 3), torch.device("cpu")),
        list_benchmark_points([op], ["bfloat16"], [6000], 3),
    )
    x, out = vectors.make_tensors(point)
    with pytest.raises(RuntimeError, match=f"mine returned a wrong result: {op} of 3000 bfloat16 elements on rank 1, "):
        vectors.check_result(point, x, out, "mine")
    expected = vectors.compute_expected(point)
    (x if op in ("broadcast", "all_reduce") else out).copy_(expected)
    vectors.check_result(point, x, out, "mine")
    (x if op in ("broadcast", "all_reduce") else out)[7] += 1
    with pytest.raises(RuntimeError, match=r"position 7: got \d+, expected \d+"):
        vectors.check_result(point, x, out, "mine")


def test_a_side_that_is_wrong_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    world = World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    (point,), vectors = (
        list_benchmark_points(["all_reduce"], ["int64"], [64], 1),
        BenchmarkVectors(0, world, world.device),
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sides = {
            "right": CollectiveVariant({"all_reduce": lambda x, out: x}),
            "other": CollectiveVariant({"broadcast": print}),
        }
        assert list(script.measure_variants(sides, 1, point, vectors, world)) == ["right"]
        with pytest.raises(RuntimeError, match="returned a wrong result: all_reduce of 8 int64 elements on rank 0, "):
            script.measure_variants(
                {"wrong": CollectiveVariant({"all_reduce": lambda x, out: x.add_(1)})}, 0, point, vectors, world
            )
    finally:
        dist.destroy_process_group()


def test_three_ranks_add_up_exactly_in_every_type_also_where_a_vector_is_shorter_than_the_ring(tmp_path: Path) -> None:
    types = "dtypes=[bfloat16,int64]"
    words = ("processes_per_node=3", f"ops=[{','.join(OPS)}]", types, "sizes=[16]", "rounds=1", "plot=false")
    built_in = ("algorithms=[halving_doubling,star]", "transports=[memory]")
    done = run("collectives", *words, *built_in, "launch.threads=1", "log.progress=none", runs=tmp_path)
    assert done.status == 0, done.err
    sides = {(point["op"], point["side"]) for point in done.result["points"]}
    assert sides == {(op, side) for op in OPS for side in ("gloo", "halving_doubling, memory")} | {
        *((op, "isend ring") for op in OPS[2:]),
        ("all_reduce", "star, memory"),
    }
    assert done.result["exact_results"] == 2 * len(sides)
    shared = f"3 ranks share {count_host_cores()} cores of this host; steps will be slow"
    assert (shared in done.out) == (count_host_cores() < 3)
    assert "halving_doubling requires the number of ranks to be a power of two (got 3); using ring instead" in done.out
    sent = {p["side"]: p["bytes_sent"] for p in done.result["points"] if p["op"] == "all_reduce"}
    assert sent["star, memory"] == [32, 16, 16], "int64, the last type"
    assert "hold nothing" not in done.out and "bytes sent" in done.out


def test_a_measurement_has_a_figure_and_neither_data_nor_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built_in = ("algorithms=[star]", "transports=[memory]", "launch.nodes=2", "launch.threads=1")
    done = run("collectives", "sizes=[4,64K]", "rounds=2", *built_in, runs=tmp_path / "runs")
    assert done.status == 0, done.err
    assert {point["side"] for point in done.result["points"]} == {"gloo", "isend ring", "star, network"}
    assert "transports=memory uses the network, because no two ranks are on the same host" in done.out
    assert "samples_per_second" not in done.result and 0 <= done.result["foreign_cpu_share"] <= 1
    assert "samples/s" not in done.out
    assert sorted(path.name for path in done.folder.path.glob("*.png")) == [
        "all_reduce_float32.png",
        "sendrecv_float32.png",
    ]
    assert "data" not in done.folder.result and not (done.folder.path / "model.json").exists()
    assert "epoch" not in done.out and "data none" not in done.out
    for verb in ("evaluate", "export"):
        told = inside.run_verb(verb, "--", str(done.folder.path))
        assert told.returncode == 2 and "collectives does not train a model; use another run" in told.stderr
    again = RunFolder(shutil.copytree(done.folder.path, tmp_path / "again" / done.folder.path.name))
    assert rerun.compare_runs(done.folder, again)
    assert capsys.readouterr().out == "result      bitwise equal: exact_results, data\n"
    result = json.loads((again.path / "result.json").read_text())
    write_json(again.path / "result.json", result | {"outcome": {"exact_results": 19}})
    assert not rerun.compare_runs(done.folder, again)
    assert capsys.readouterr().out == "result      exact_results: was 20, now 19, 1 apart\n"


def test_a_resumed_measurement_keeps_its_rounds(tmp_path: Path) -> None:
    saving = ("checkpoint.every_steps=7", "checkpoint.every_seconds=0", "checkpoint.keep=9")
    words = (*saving, "algorithms=[]", "launch.threads=1", "log.progress=none")
    whole = run("collectives", *COLLECTIVES.smallest, *words, runs=tmp_path / "whole").folder
    folder = cut_off(whole, 21, tmp_path)  # within a round
    before = folder.read_metrics()[:21]
    for wrong, part in (
        ("sizes=[4,2K]", "sizes cannot change when a run is resumed"),
        ("processes_per_node=3", "has shape (10, 4, 2, 2, 3) in the checkpoint but (10, 4, 2, 3, 3) in this run"),
        ("rounds=11", "has shape (10, 4, 2, 2, 3) in the checkpoint but (11, 4, 2, 2, 3) in this run"),
    ):
        copy = RunFolder(shutil.copytree(folder.path, tmp_path / wrong / folder.path.name))
        done = resume(COLLECTIVES, copy, wrong)
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = resume(COLLECTIVES, folder)
    assert done.returncode == 0 and "resumed from step 21" in done.stdout, done.stderr
    assert trained_steps(folder) == list(range(1, 41)) and folder.read_metrics()[:21] == before
    name = "all_reduce float32 gloo"
    times = [row[name] for row in folder.read_metrics() if row.get("bytes") == 1024 and name in row]
    (point,) = (
        p for p in values_of(folder)["points"] if (p["op"], p["bytes"], p["side"]) == ("all_reduce", 1024, "gloo")
    )
    assert len(times) == 10 and point["least"] == min(times) and point["most"] == max(times), "of all ten rounds"


# ---- settings


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("sizes=[0]", ["sizes=[0]: each size must be from 1 to 1G bytes", "64K"]),
        ("sizes=[]", ["sizes=[]: each size must be"]),
        ("sizes=[4,2G]", ["sizes=[2G]"]),
        ("sizes=[4k]", ["sizes=[4k]"]),
        ("sizes=[5]", ["sizes=[5] must be a multiple of the 4 bytes of one float32; use 4 or 8"]),
        ("dtypes=[float32,fp8]", ["dtypes=[fp8] is invalid; use one or more of float32"]),
        ("ops=[allreduce]", ["ops=[allreduce] is invalid; use one or more of sendrecv, broadcast, all_reduce"]),
        ("ops=[all_reduce,all_reduce]", ["ops=[all_reduce]", "each at most once"]),
        ("ops=[]", ["ops=[] is invalid; use one or more of"]),
        ("algorithms=[rign]", ["algorithms=[rign] is invalid; use one or more of ring, halving_doubling, tree"]),
        ("transports=[tls]", ["[tls] requires the certificate", "add launch.backend=builtin launch.tls=true"]),
        ("transports=[]", ["transports=[] is invalid; use one or more of network, memory"]),
        ("rounds=0", ["rounds=0: out of range"]),
        ("processes_per_node=1", ["collectives require at least two ranks; use processes_per_node=2"]),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_remedy(word: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, [word], {})
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


def test_settings_of_training_are_not_offered() -> None:
    text = config.format_help(Config)
    assert "  rounds=10  (int from 1 to 100000)" in text and "  launch.threads=0" in text
    assert not [key for key in ("epochs", "batch", "dtype", "data.name", "optim.lr") if f"  {key}=" in text]
    with pytest.raises(UserError, match=r"unknown key data.name; this experiment trains no model"):
        config.load_config(Config, ["data.name=digits"], {})
    assert config.load_config(Config, [], {"DATA_ROOT": "/there"}) == config.load_config(Config, [], {})


def test_settings_of_training_in_the_config_of_an_old_run_are_ignored_and_kept(tmp_path: Path) -> None:
    expected = config.load_config(Config, ["rounds=3"], {})
    file = tmp_path / "collectives-20260101-120000-4f1c" / "config.yaml"
    file.parent.mkdir()
    file.write_text(config.format_yaml(expected) + "epochs: 1\ndata:\n  name: none\n")
    for option in (f"--config={file}", f"--resume={file.parent}"):
        assert config.load_config(Config, [option], {}) == expected
        with pytest.raises(UserError, match=r"unknown key epochs; this experiment trains no model"):
            config.load_config(Config, [option, "epochs=2"], {})
    text = config.format_yaml_with_keys_of_file(expected, file)
    assert "name: none" in text, "the source code that the run keeps still has these settings"
