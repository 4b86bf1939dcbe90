"""Benchmarks of local SGD: accuracy with its interval, and steps by rate of the cable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import local_sgd
from tests.benchmarks import local_sgd_crossover as crossover
from tests.benchmarks.local_sgd_cable_ranks import BF16, FP32, LOCAL, POWERSGD, TORCH
from tests.benchmarks.measure import Number, Pace, Samples, interleave


def test_the_model_of_a_step_is_its_time_without_a_limit_and_that_of_its_bytes(tmp_path: Path) -> None:
    assert [crossover.count_bytes(name) for name in crossover.STRATEGIES] == [3766104, 1883052, 79376, 470763]
    assert crossover.count_run_bytes(crossover.POWERSGD, 11) == 9 * 3766104 + 2 * 79376
    assert crossover.count_run_bytes(crossover.DDP, 11) == 11 * 3766104
    free = 0.05
    samples = Samples()
    for rate in (crossover.FREE, *crossover.RATES):
        seconds = free if rate == crossover.FREE else 0.1
        samples.values[rate] = {name: [seconds] for name in crossover.STRATEGIES}
        samples.values[rate] |= {"seconds": [0.4], "others": [0.0]}
    rows = {row.what: row.cells for row in crossover.table(samples).rows}
    assert len(rows) == 16
    assert rows[f"{crossover.DDP}, 50 Mbit/s"][1] == f"{1e3 * (free + 3766104 / 6.25e6):.3g}"
    assert crossover.predict_seconds(free, crossover.LOCAL, "1gbit") == pytest.approx(free + 470763 / 125e6)
    crossover.draw_rates(tmp_path / "rates.svg", {"samples": samples.values})
    assert "alpha + beta n" in (tmp_path / "rates.svg").read_text()


@pytest.mark.drawn
@pytest.mark.usefixtures("forked")
def test_the_loss_of_local_sgd_comes_with_its_interval(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_sgd.compute_t_quantile(15) == pytest.approx(2.1314, abs=2e-3)
    interval = local_sgd.compute_interval([0.0, 0.1, 0.2, 0.1, 0.1])
    assert interval.value == pytest.approx(0.1)
    assert interval.high == pytest.approx(0.1 + 2.776 * 0.0316, abs=2e-3)
    small = ("data.name=digits", f"data.cache={cache}", "data.train_limit=2560", "data.test_limit=200")
    monkeypatch.setattr(local_sgd, "SETTINGS", (*small, "model=mlp", "batch=64", "launch.threads=1"))
    sides = [local_sgd.train(tmp_path, name) for name in local_sgd.SIDES]
    samples = interleave(sides, Pace(2, 0, 60), lambda _: None)
    ddp, eight_steps, *_ = local_sgd.accuracy_table(samples).rows
    assert ddp.bound is None
    assert (eight_steps.what, eight_steps.bound, eight_steps.at_least) == ("H = 8", 0.2, False)
    numbers = [cell.value for cell in eight_steps.cells[3:] if isinstance(cell, Number)]
    assert numbers == [5, pytest.approx(5 * 4e-6 * 109386)]


def test_the_table_of_the_cable_has_goals() -> None:
    measured = {"seconds": [0.5], "others": [0.0]}
    for name in (FP32, BF16, POWERSGD, TORCH, LOCAL):
        measured[f"{name}: seconds"] = [0.1]
        measured[f"{name}: megabytes"] = [0.1]
    rows = local_sgd.cable_table(Samples({"run": measured})).rows
    goals = [(row.bound, row.at_least) for row in rows[1:]]
    assert goals == [(1.3, True), (1.8, True), (None, True), (2.2, True), (1.05, False)]


@pytest.mark.drawn
@pytest.mark.usefixtures("forked")
def test_accuracy_of_strategies_comes_with_the_bytes_that_were_sent(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = ("data.name=digits", f"data.cache={cache}", "data.train_limit=640", "data.test_limit=50", "batch=64")
    monkeypatch.setattr(crossover, "ON_MNIST", brief)
    sides = [crossover.measure_accuracy(tmp_path, name) for name in (crossover.DDP, crossover.LOCAL)]
    samples = interleave(sides, Pace(1, 0, 60), lambda _: None)
    sent_bytes = [side["bytes"] for side in samples.values.values()]
    assert sent_bytes == [[10 * 3766104], [2 * 3766104]], "ten steps, and two rounds of at most eight steps"
    rows = crossover.accuracy_table(samples).rows
    assert len(rows) == 2
    crossover.draw_accuracy(tmp_path / "bytes.svg", {"table": {"rows": [row.json() for row in rows]}})
