"""Benchmarks run: one of two processes that take turns, and runs of each experiment whose results they read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks import (
    amp_accum,
    collectives,
    crossover,
    figures,
    local_sgd,
    mnist_pipeline,
    optimizers,
    param_server,
    parts,
    ranks,
    resnet_modelparallel,
    sparse_prune,
)
from tests.benchmarks.cable_ranks import BF16, FP32, LOCAL, POWERSGD, TORCH
from tests.benchmarks.measure import Number, Pace, Samples, interleave
from tests.benchmarks.parts import run_of
from tests.harness import warm
from tests.harness.processes import environment
from tests.harness.registry import TRAINING, Entry
from tests.harness.warm import ROOT

KEEP = {
    "mnist_pipeline": tuple(mnist_pipeline.IDLE),
    "resnet_modelparallel": resnet_modelparallel.KEEP,
    "amp_accum": amp_accum.KEEP,
    "param_server": param_server.KEEP,
    "sparse_prune": sparse_prune.SCORES,
}


def test_a_benchmark_ends_with_a_table_and_leaves_its_samples(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks", f"--folder={tmp_path}", "--minutes=0.4", "--rounds=1"]
    done = subprocess.run(
        [*command, "--", "sparse_prune/linear"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "sparse_prune/linear  98 %" in done.stdout
    (file,) = tmp_path.iterdir()
    part = json.loads(file.read_text())["parts"]["sparse_prune/linear"]
    assert part["rounds"] == len(part["samples"]["bf16"]["seconds"]) >= 1 and part["facts"] == {"threads": 2}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of benchmarks are forks of the warm process."""

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        return warm.execute([command[0], str(ROOT / command[1]), *command[2:]], env=env)

    monkeypatch.setattr(parts, "subprocess", SimpleNamespace(run=run))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("entry", TRAINING, ids=lambda entry: entry.name)
def test_benchmarks_read_the_results_of_each_experiment(entry: Entry, tmp_path: Path, cache: Path) -> None:
    data = () if entry.name == "resnet_modelparallel" else ("data.name=digits",)
    words = (*entry.smallest, *data, f"data.cache={cache}", "steps=6", "data.test_limit=50")
    found = run_of(tmp_path, "side", entry.name, *words, keep=KEEP.get(entry.name, ())).run(0)
    assert found["seconds"] > 0 and found["first_loss"] > 0 and found["last_loss"] > 0
    missing = [name for name in KEEP.get(entry.name, ()) if not any(key.startswith(name) for key in found)]
    assert not missing


@pytest.mark.usefixtures("forked")
def test_the_rate_of_the_lowest_training_loss_is_chosen_and_one_that_diverges_is_not(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = (
        "data.name=digits",
        f"data.cache={cache}",
        "data.train_limit=640",
        "data.test_limit=50",
        "epochs=2",
        "optim.warmup=0",
    )
    sides = [optimizers.tune(tmp_path, side, 64, (1e-5, 0.03, 100), brief) for side in optimizers.OPTIMIZERS]
    taken = interleave(sides, Pace(1, 0, 60), lambda _: None)
    assert [found["rate"] for found in taken.values.values()] == [[0.03], [0.03]]
    monkeypatch.setattr(optimizers, "BATCHES", (64,))
    (row,) = optimizers.table(taken).rows
    assert row.what == "64" and row.cells[3] == "4,685" and all(isinstance(cell, Number) for cell in row.cells[:3])
    with pytest.raises(RuntimeError, match="all of 1 learning rates diverged"):
        optimizers.tune(tmp_path, optimizers.SGD, 64, (100,), brief).run(0)


def test_the_model_of_a_step_is_its_time_without_a_limit_and_that_of_its_bytes(tmp_path: Path) -> None:
    assert [crossover.count_bytes(name) for name in crossover.STRATEGIES] == [3766104, 1883052, 79376, 470763]
    free, taken = 0.05, Samples()
    for rate in (crossover.FREE, *crossover.RATES):
        found = dict.fromkeys(crossover.STRATEGIES, 0.05 if rate == crossover.FREE else 0.1)
        taken.values[rate] = {name: [seconds] for name, seconds in (found | {"seconds": 0.4, "others": 0.0}).items()}
    rows = {row.what: row.cells for row in crossover.table(taken).rows}
    assert len(rows) == 16 and rows[f"{crossover.DDP}, 50mbit"][1] == f"{1e3 * (free + 3766104 / 6.25e6):.3g}"
    assert crossover.predict_seconds(free, crossover.LOCAL, "1gbit") == pytest.approx(free + 470763 / 125e6)
    figures.draw_crossover(tmp_path / "rates.svg", {"samples": taken.values})
    assert "alpha + beta n" in (tmp_path / "rates.svg").read_text()


@pytest.mark.usefixtures("forked")
def test_the_loss_of_local_sgd_comes_with_its_interval(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_sgd.compute_t_quantile(15) == pytest.approx(2.1314, abs=2e-3)
    interval = local_sgd.compute_interval([0.0, 0.1, 0.2, 0.1, 0.1])
    assert interval.value == pytest.approx(0.1) and interval.high == pytest.approx(0.1 + 2.776 * 0.0316, abs=2e-3)
    small = ("data.name=digits", f"data.cache={cache}", "data.train_limit=2560", "data.test_limit=200")
    monkeypatch.setattr(local_sgd, "WORDS", (*small, "model=mlp", "batch=64", "launch.threads=1"))
    taken = interleave([local_sgd.train(tmp_path, name) for name in local_sgd.SIDES], Pace(2, 0, 60), lambda _: None)
    ddp, eight, *_ = local_sgd.accuracy_table(taken).rows
    assert ddp.bound is None and (eight.what, eight.bound, eight.at_least) == ("H = 8", 0.2, False)
    assert [cell.value for cell in eight.cells[3:] if isinstance(cell, Number)] == [5, pytest.approx(5 * 4e-6 * 109386)]
    found = {
        f"{name}: {what}": [0.1] for name in (FP32, BF16, POWERSGD, TORCH, LOCAL) for what in ("seconds", "megabytes")
    }
    rows = local_sgd.cable_table(Samples({"run": found | {"seconds": [0.5], "others": [0.0]}})).rows
    assert [(row.bound, row.at_least) for row in rows[1:]] == [
        (1.3, True),
        (1.8, True),
        (None, True),
        (2.2, True),
        (1.05, False),
    ]


@pytest.mark.usefixtures("forked")
def test_accuracy_of_strategies_comes_with_the_bytes_that_were_sent(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = ("data.name=digits", f"data.cache={cache}", "data.train_limit=640", "data.test_limit=50", "batch=64")
    monkeypatch.setattr(crossover, "ON_MNIST", brief)
    sides = [crossover.measure_accuracy(tmp_path, name) for name in (crossover.DDP, crossover.LOCAL)]
    taken = interleave(sides, Pace(1, 0, 60), lambda _: None)
    exact = [found["bytes"] for found in taken.values.values()]
    assert exact == [[10 * 3766104], [2 * 3766104]], "ten steps, and two rounds of at most eight"
    assert len(crossover.accuracy_table(taken).rows) == 2
    figures.draw_accuracy(tmp_path / "bytes.svg", {"samples": taken.values})


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
    assert isinstance(many.cells[0], Number) and many.cells[0].value == pytest.approx(gloo / ring, rel=1e-5)
    figures.draw_collectives(tmp_path / "times.svg", {"samples": by_size.values})
    assert "star, memory, fitted" in (tmp_path / "times.svg").read_text()


@pytest.mark.usefixtures("forked")
def test_an_experiment_without_comparisons_is_measured_with_one_rank_and_two(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = ("data.name=digits", f"data.cache={cache}", "steps=6", "data.test_limit=50")
    monkeypatch.setattr(ranks, "BRIEF", brief)
    part, taken = ranks.make_part("ddp_multinode"), list[Samples]()
    interleave(part.sides(tmp_path), Pace(1, 0, 60), taken.append)
    rows = {row.what: row.cells for row in part.table(taken[-1]).rows}
    assert list(rows)[:2] == ["ms a step: 1 process", "ms a step: 2 processes"] and len(rows) == 3
    one, two, gain = (cells[0].value for cells in rows.values() if isinstance(cells[0], Number))
    assert gain == pytest.approx(one / two / 2)
