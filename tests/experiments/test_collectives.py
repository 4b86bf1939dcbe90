"""collectives: formulas of the table, exact results, resuming, and invalid settings."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from common.backend.algorithms import build_algorithms_by_size
from common.backend.cost import MessageTimeLine
from common.config import config
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder, read_json, write_json
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
from slurm.launch import rerun, settings_files
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import read_result_values, run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.resuming import copy_as_interrupted, list_trained_steps, resume_run

COLLECTIVES = ENTRY_BY_NAME["collectives"]
BACKEND_VARIANT = CollectiveVariant({})
VARIANTS = {
    "gloo": BACKEND_VARIANT,
    "isend ring": CollectiveVariant({}, algorithms=build_algorithms_by_size("ring", 2), link_variant="gloo"),
}


# ---- formulas


FACTORS = [
    ("sendrecv", 1.0, 8.0),
    ("broadcast", 1.0, 6.0),
    ("all_reduce", 1.5, 12.0),
    ("reduce_scatter", 0.75, 6.0),
    ("all_gather", 0.75, 6.0),
]


@pytest.mark.parametrize("op, bus, sent_bytes", FACTORS)
def test_factors_of_four_ranks_are_those_of_nccl_tests(op: str, bus: float, sent_bytes: float) -> None:
    assert compute_bus_factor(op, 4) == bus
    assert compute_sent_bytes(CollectivePoint(op, "float32", 2, 8), BACKEND_VARIANT, 4) == [sent_bytes] * 4


def test_sent_bytes_follow_from_the_moves_of_the_algorithm() -> None:
    star = CollectiveVariant({}, algorithms=build_algorithms_by_size("star<1000<ring", 3), widens_half_precision=True)
    assert compute_sent_bytes(CollectivePoint("all_reduce", "float32", 100, 400), star, 3) == [800, 400, 400]
    assert compute_sent_bytes(CollectivePoint("all_reduce", "bfloat16", 200, 400), star, 3) == [1600, 800, 800]
    # 600 bytes in bfloat16 are sent as 1,200 bytes in float32, so the ring is used
    assert compute_sent_bytes(CollectivePoint("all_reduce", "bfloat16", 300, 600), star, 3) == [1600] * 3
    assert compute_sent_bytes(CollectivePoint("broadcast", "bfloat16", 150, 300), star, 3) == [200] * 3


def test_sizes_of_sharded_operations_are_rounded_up_to_equal_shards() -> None:
    points = list_benchmark_points(["all_reduce", "all_gather"], ["float32", "int64"], [8, 1024], 3)
    assert [f"{point.name} {point.length} {point.nbytes}" for point in points] == [
        "all_reduce float32 2 8",
        "all_reduce float32 256 1024",
        "all_reduce int64 1 8",
        "all_reduce int64 128 1024",
        "all_gather float32 3 12",
        "all_gather float32 258 1032",
        "all_gather int64 3 24",
        "all_gather int64 129 1032",
    ]


def test_the_report_computes_its_table_from_the_times() -> None:
    """Links have 100 us and 1 GB/s; an all-reduce takes twice as long; the second rank is slower."""
    points = list_benchmark_points(["sendrecv", "all_reduce"], ["float32"], [4000, 4_000_000], 2)
    table = torch.zeros(3, len(points), 2, 2, 3, dtype=torch.float64)
    for i, point in enumerate(points):
        seconds = 1e-4 + 1e-9 * point.nbytes
        if point.op == "all_reduce":
            seconds *= 2
        for number, factor in enumerate((1.0, 0.5, 5.0)):  # the median round comes first
            slower = factor * seconds
            table[number, i, 0] = torch.tensor([[0.9 * slower, 0, point.nbytes], [slower, 0, point.nbytes]])
    table[2, 3] = 0  # the run ended before
    table[0, 2:, 1] = torch.tensor([5e-3, 6e6, 100])
    report = CollectiveReport(points, VARIANTS, table, {"0 - 1": MessageTimeLine(2e-5, 0)})

    data = report.result()
    assert data.outcome == {"exact_results": 13}
    assert len(data.measured["points"]) == 6
    small, large = data.measured["points"][2::2]
    assert small["side"] == "gloo"
    assert small["bytes"] == 4000
    assert small["seconds"] == pytest.approx(2 * 1.04e-4)
    assert small["least"] == pytest.approx(0.5 * small["seconds"])
    assert small["most"] == pytest.approx(5 * small["seconds"])
    assert large["seconds"] == pytest.approx(0.75 * 2 * 4.1e-3), "the median of two rounds is their mean"
    assert large["bytes_per_second"] == pytest.approx(4e6 / large["seconds"])
    assert large["bytes_per_second"] == large["bus_bytes_per_second"]
    line = data.measured["lines"]["sendrecv float32 gloo"]
    assert line["alpha"] == pytest.approx(1e-4)
    assert line["beta"] == pytest.approx(1e-9)

    rows = report.rows()
    assert "gloo: 100.0 us + bytes / 1 GB/s" in rows["sendrecv float32"].splitlines()
    assert "4,200.0 us predicted from link speeds for the largest size" in rows["all_reduce float32"]
    assert rows["links"] == "ranks 0 - 1: 20.0 us for any size"
    assert rows["bytes sent"].splitlines()[-2:] == [
        "all_reduce float32, 4,000,000 bytes, gloo: through the network interface 4.00 MB per rank; "
        "computed 4.00 MB per rank",
        "all_reduce float32, 4,000,000 bytes, isend ring: sent 6.00 MB per rank; computed 4.00 MB per rank",
    ]


def test_one_size_has_no_fitted_line() -> None:
    points = list_benchmark_points(["all_reduce"], ["float32"], [4, 8], 2)
    table = torch.zeros(1, 2, 1, 2, 3, dtype=torch.float64)
    table[0, 0, 0, :, 0] = 1e-3
    report = CollectiveReport(points, {"gloo": BACKEND_VARIANT}, table)
    assert report.fit_lines() == {}
    assert len(report.cells) == 1
    assert report.rows()["bytes sent"] == "unknown"


# ---- results


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_result_is_reported_with_its_position(op: str) -> None:
    vectors = BenchmarkVectors(0, RankInfo(1, 3), torch.device("cpu"))
    (point,) = list_benchmark_points([op], ["bfloat16"], [6000], 3)
    inputs, outputs = vectors.make_tensors(point)
    received = inputs if op in ("broadcast", "all_reduce") else outputs  # these two work in place
    with pytest.raises(RuntimeError, match=f"ring returned a wrong result: {op} of 3000 bfloat16 elements on rank 1, "):
        vectors.check_result(point, inputs, outputs, "ring")

    received.copy_(vectors.compute_expected(point))
    vectors.check_result(point, inputs, outputs, "ring")

    received[7] += 1
    with pytest.raises(RuntimeError, match=r"position 7: got \d+, expected \d+"):
        vectors.check_result(point, inputs, outputs, "ring")


def test_a_wrong_variant_stops_the_measurement(world: World) -> None:
    (point,) = list_benchmark_points(["all_reduce"], ["int64"], [64], 1)
    vectors = BenchmarkVectors(0, world, world.device)
    correct = {
        "right": CollectiveVariant({"all_reduce": lambda x, out: x}),
        "other": CollectiveVariant({"broadcast": print}),
    }
    wrong = {"wrong": CollectiveVariant({"all_reduce": lambda x, out: x.add_(1)})}
    assert list(script.measure_variants(correct, 1, point, vectors, world)) == ["right"]
    with pytest.raises(RuntimeError, match="returned a wrong result: all_reduce of 8 int64 elements on rank 0, "):
        script.measure_variants(wrong, 0, point, vectors, world)


def test_three_ranks_compute_exact_results_even_for_vectors_shorter_than_the_ring(tmp_path: Path) -> None:
    points = (f"ops=[{','.join(OPS)}]", "dtypes=[bfloat16,int64]", "sizes=[16]", "rounds=1")
    built_in = ("algorithms=[halving_doubling,star]", "transports=[memory]")
    quiet = ("plot=false", "launch.threads=1", "log.progress=none")
    completed = run_experiment("collectives", "processes_per_node=3", *points, *built_in, *quiet, runs=tmp_path)
    measured = {(point["op"], point["side"]) for point in completed.result["points"]}
    expected = {("all_reduce", "star, memory")}
    expected |= {(op, side) for op, side in itertools.product(OPS, ("gloo", "halving_doubling, memory"))}
    expected |= {(op, "isend ring") for op in OPS[2:]}
    assert measured == expected
    assert completed.result["exact_results"] == 2 * len(measured)
    warning = f"3 ranks share {count_host_cores()} cores of this host; steps will be slow"
    assert (warning in completed.stdout) == (count_host_cores() < 3)
    notice = "halving_doubling requires the number of ranks to be a power of two (got 3); using ring instead"
    assert notice in completed.stdout
    sent = {point["side"]: point["bytes_sent"] for point in completed.result["points"] if point["op"] == "all_reduce"}
    assert sent["star, memory"] == [32, 16, 16], "the last type is int64"
    assert "hold nothing" not in completed.stdout
    assert "bytes sent" in completed.stdout


def test_a_measurement_has_a_figure_and_neither_data_nor_model(tmp_path: Path) -> None:
    built_in = ("algorithms=[star]", "transports=[memory]", "launch.nodes=2", "launch.threads=1")
    completed = run_experiment("collectives", "sizes=[4,64K]", "rounds=2", *built_in, runs=tmp_path)
    assert completed.result["exact_results"] == 20
    assert {point["side"] for point in completed.result["points"]} == {"gloo", "isend ring", "star, network"}
    assert "transports=memory uses the network, because no two ranks are on the same host" in completed.stdout
    assert "samples_per_second" not in completed.result
    assert 0 <= completed.result["foreign_cpu_share"] <= 1
    assert "samples/s" not in completed.stdout
    figures = {path.name for path in completed.folder.path.glob("*.png")}
    assert figures == {"all_reduce_float32.png", "sendrecv_float32.png"}
    assert "data" not in completed.folder.result
    assert not (completed.folder.path / "model.json").exists()
    assert "epoch" not in completed.stdout
    assert "data none" not in completed.stdout
    for verb in ("evaluate", "export"):
        command = in_process_calls.call_verb(verb, "--", str(completed.folder.path), status=2)
        assert "collectives does not train a model; use another run" in command.stderr


@pytest.mark.slow
def test_repeated_measurements_are_compared_by_their_exact_results(
    finished: GetRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = finished(COLLECTIVES).folder
    exact_results = read_result_values(first)["exact_results"]
    again = RunFolder(shutil.copytree(first.path, tmp_path / first.path.name))
    assert rerun.compare_runs(first, again)
    assert capsys.readouterr().out == "result      bitwise equal: exact_results, data\n"
    result = read_json(again.path / "result.json")
    write_json(again.path / "result.json", result | {"outcome": {"exact_results": exact_results - 1}})
    assert not rerun.compare_runs(first, again)
    message = f"result      exact_results: was {exact_results}, now {exact_results - 1}, 1 apart\n"
    assert capsys.readouterr().out == message


@pytest.mark.slow
def test_a_resumed_measurement_keeps_its_rounds(tmp_path: Path) -> None:
    saving = ("checkpoint.every_steps=7", "checkpoint.every_seconds=0", "checkpoint.keep=9")
    quiet = ("algorithms=[]", "launch.threads=1", "log.progress=none")
    uninterrupted = run_experiment(
        "collectives", *COLLECTIVES.smallest_settings, *saving, *quiet, runs=tmp_path / "whole"
    ).folder
    folder = copy_as_interrupted(uninterrupted, 21, tmp_path)  # within a round
    before = folder.read_metrics()[:21]
    for setting, message in (
        ("sizes=[4,2K]", "sizes cannot change when a run is resumed"),
        ("processes_per_node=3", "has shape (10, 4, 2, 2, 3) in the checkpoint but (10, 4, 2, 3, 3) in this run"),
        ("rounds=11", "has shape (10, 4, 2, 2, 3) in the checkpoint but (11, 4, 2, 2, 3) in this run"),
    ):
        copy = RunFolder(shutil.copytree(folder.path, tmp_path / setting / folder.path.name))
        completed = resume_run(COLLECTIVES, copy, setting, status=2)
        assert message in completed.stderr
    completed = resume_run(COLLECTIVES, folder)
    assert "resumed from step 21" in completed.stdout, completed.stderr
    assert list_trained_steps(folder) == list(range(1, 41))
    assert folder.read_metrics()[:21] == before
    column = "all_reduce float32 gloo"
    times = [row[column] for row in folder.read_metrics() if row.get("bytes") == 1024 and column in row]
    points = {(point["op"], point["bytes"], point["side"]): point for point in read_result_values(folder)["points"]}
    point = points["all_reduce", 1024, "gloo"]
    assert len(times) == 10, "the times of all rounds"
    assert point["least"] == min(times)
    assert point["most"] == max(times)


# ---- settings


INVALID_SETTINGS = {
    "sizes=[0]": "sizes=[0]: each size must be from 1 to 1G bytes ... 64K",
    "sizes=[]": "sizes=[]: each size must be",
    "sizes=[4,2G]": "sizes=[2G]",
    "sizes=[4k]": "sizes=[4k]",
    "sizes=[5]": "sizes=[5] must be a multiple of the 4 bytes of one float32; use 4 or 8",
    "dtypes=[float32,fp8]": "dtypes=[fp8] is invalid; use one or more of float32",
    "ops=[allreduce]": "ops=[allreduce] is invalid; use one or more of sendrecv, broadcast, all_reduce",
    "ops=[all_reduce,all_reduce]": "ops=[all_reduce] ... each at most once",
    "ops=[]": "ops=[] is invalid; use one or more of",
    "algorithms=[rign]": "algorithms=[rign] is invalid; use one or more of ring, halving_doubling, tree",
    "transports=[tls]": "[tls] requires the certificate ... add launch.backend=builtin launch.tls=true",
    "transports=[]": "transports=[] is invalid; use one or more of network, memory",
    "rounds=0": "rounds=0: out of range",
    "processes_per_node=1": "collectives require at least two ranks; use processes_per_node=2",
}


@pytest.mark.parametrize("setting, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused_with_the_remedy(setting: str, message: str) -> None:
    with expect_refusal(message):
        config.load_config(Config, [setting], {})


def test_settings_of_training_are_not_available() -> None:
    text = config.format_help(Config)
    assert "  rounds=10  (int from 1 to 100000)" in text
    assert "  launch.threads=0" in text
    for key in ("epochs", "batch", "dtype", "data.name", "optim.lr"):
        assert f"  {key}=" not in text
    with pytest.raises(UserError, match=r"unknown key data.name; this experiment trains no model"):
        config.load_config(Config, ["data.name=digits"], {})
    assert config.load_config(Config, [], {"DATA_ROOT": "/there"}) == config.load_config(Config, [], {})


def test_settings_of_training_in_the_config_of_an_old_run_are_ignored_and_kept(tmp_path: Path) -> None:
    expected = config.load_config(Config, ["rounds=3"], {})
    file = tmp_path / "collectives-20260101-120000-4f1c/config.yaml"
    file.parent.mkdir()
    file.write_text(config.format_yaml(expected) + "epochs: 1\ndata:\n  name: none\n")
    for option in (f"--config={file}", f"--resume={file.parent}"):
        assert config.load_config(Config, [option], {}) == expected
        with pytest.raises(UserError, match=r"unknown key epochs; this experiment trains no model"):
            config.load_config(Config, [option, "epochs=2"], {})
    text = settings_files.format_yaml_with_keys_of_file(expected, file)
    assert "name: none" in text, "the source code in the run folder still has these settings"
