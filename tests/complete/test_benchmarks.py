"""Benchmarks run: runs of each experiment whose results they read, and topics that belong to no experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.sweeps import strategies as strategy_grid
from tests.benchmarks import optimizers, ranks, strategies
from tests.benchmarks.measure import Number, Pace, Samples, interleave
from tests.benchmarks.parts import run_of
from tests.harness.experiments.discovery import import_if_exists
from tests.harness.experiments.registry import TRAINING_ENTRIES, Entry


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("entry", TRAINING_ENTRIES, ids=lambda entry: entry.name)
def test_benchmarks_read_the_results_of_each_experiment(entry: Entry, tmp_path: Path, cache: Path) -> None:
    data = () if entry.name == "resnet_modelparallel" else ("data.name=digits",)
    arguments = (*data, *entry.smallest_settings, f"data.cache={cache}", "steps=6", "data.test_limit=50")
    declared = import_if_exists(f"tests.benchmarks.{entry.name}")
    keep = getattr(declared, "KEEP", ())
    measured = run_of(tmp_path, "side", entry.name, *arguments, keep=keep).run(0)
    assert measured["seconds"] > 0
    assert measured["first_loss"] > 0
    assert measured["last_loss"] > 0
    for name in keep:
        assert any(key.startswith(name) for key in measured), name


@pytest.mark.usefixtures("forked")
def test_the_rate_with_the_lowest_training_loss_is_chosen_and_divergence_is_reported(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ("data.name=digits", f"data.cache={cache}", "data.train_limit=640", "data.test_limit=50")
    brief = (*data, "epochs=2", "optim.warmup=0")
    sides = [optimizers.tune(tmp_path, side, 64, (1e-5, 0.03, 100), brief) for side in optimizers.OPTIMIZERS]
    samples = interleave(sides, Pace(1, 0, 60), lambda _: None)
    assert [side["rate"] for side in samples.values.values()] == [[0.03], [0.03]]
    monkeypatch.setattr(optimizers, "BATCHES", (64,))
    (row,) = optimizers.table(samples).rows
    assert row.what == "64"
    assert row.cells[3] == "4,685"
    assert all(isinstance(cell, Number) for cell in row.cells[:3])
    with pytest.raises(RuntimeError, match="all of 1 learning rates diverged"):
        optimizers.tune(tmp_path, optimizers.SGD, 64, (100,), brief).run(0)


@pytest.mark.usefixtures("forked")
def test_an_experiment_without_comparisons_is_measured_with_one_rank_and_two(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = ("data.name=digits", f"data.cache={cache}", "steps=6", "data.test_limit=50")
    monkeypatch.setattr(ranks, "BRIEF", brief)
    part = ranks.make_part("ddp_multinode")
    samples = list[Samples]()
    interleave(part.sides(tmp_path), Pace(1, 0, 60), samples.append)
    rows = {row.what: row.cells for row in part.table(samples[-1]).rows}
    assert list(rows)[:2] == ["ms per step: 1 process", "ms per step: 2 processes"]
    assert len(rows) == 3
    one_rank, two_ranks, efficiency = (cells[0].value for cells in rows.values() if isinstance(cells[0], Number))
    assert efficiency == pytest.approx(one_rank / two_ranks / 2)


def test_a_table_of_strategies_begins_with_the_default_of_each_division() -> None:
    declared = strategies.get_strategies("resnet_modelparallel")
    labels = [declared.format_label(point) for point in strategy_grid.list_points(declared, 2)]
    ordered = strategies.sort_labels(labels, declared)
    defaults = ["one process mode=single", "replicas=2 mode=single", "stages=2 schedule=gpipe"]
    assert ordered[: len(defaults)] == defaults
    recomputed = [label for label in labels if "recompute=blocks" in label]
    assert ordered[-len(recomputed) :] == recomputed


def test_the_largest_deviation_from_a_formula_is_shown() -> None:
    columns = {"seconds": [1.0, 3.0, 2.0], "others": [0.0] * 3, "sent_deviation": [0.001, -0.02, 0.01]}
    samples = Samples({"fsdp=2": columns})
    assert strategies.make_cell(samples, "fsdp=2", "sent_deviation", 100) == "2.00"
    assert strategies.make_cell(samples, "fsdp=2", "seconds", 1e3) == Number(2000, 1000, 3000)
