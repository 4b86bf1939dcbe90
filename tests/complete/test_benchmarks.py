"""Benchmarks run: runs of each experiment whose results they read, and topics that belong to no experiment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.sweeps import strategies as strategy_grid
from slurm.reports.strategies import StrategyRun
from slurm.reports.strategy_formulas import RankFormulas
from tests.benchmarks import growth, optimizers, ranks, runs, strategies
from tests.benchmarks.measure import Number, Pace, Samples, interleave
from tests.benchmarks.parts import run_of
from tests.harness.commands import in_process_calls
from tests.harness.environment.randomness import draw_cases
from tests.harness.experiments.discovery import import_if_exists
from tests.harness.experiments.registry import TRAINING_ENTRIES, Entry


@pytest.mark.drawn
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("entry", draw_cases("measured experiments", TRAINING_ENTRIES, 3), ids=lambda entry: entry.name)
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


@pytest.mark.drawn
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


@pytest.mark.drawn
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


def test_a_continued_comparison_starts_with_a_run_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a formula for activations, the memory is compared with the activations of one process."""
    activations = iter([40.0, 80.0, 50.0])
    formulas = RankFormulas(state_bytes=10, sample_share=0.5)

    def read_run(_: object) -> StrategyRun:
        return StrategyRun(0, 1, 1, 1, [1.0], [1.0], 1, 0, 10, next(activations), 0, None, formulas)

    for name in ("finish", "discard_run"):
        monkeypatch.setattr(strategies, name, lambda *_: None)
    monkeypatch.setattr("slurm.reports.strategies.read_run", read_run)

    _, second, third, *_ = strategies.StrategyComparison("resnet_modelparallel").list_tasks(tmp_path)
    assert second.run(1)["memory_deviation"] == pytest.approx(0)
    assert third.run(1)["memory_deviation"] == pytest.approx(0.2)


def test_the_largest_deviation_from_a_formula_is_shown() -> None:
    columns = {"seconds": [1.0, 3.0, 2.0], "others": [0.0] * 3, "sent_deviation": [0.001, -0.02, 0.01]}
    samples = Samples({"fsdp=2": columns})
    assert strategies.make_cell(samples, "fsdp=2", "sent_deviation", 100) == "2.00"
    assert strategies.make_cell(samples, "fsdp=2", "seconds", 1e3) == Number(2000, 1000, 3000)


def test_the_exponent_of_growth_compares_the_two_largest_sizes() -> None:
    no_load = [0.0] * 2
    samples = Samples(
        {
            "1": {"seconds": [5.0, 5.0], "others": no_load},
            "10": {"seconds": [1.0, 2.0], "others": no_load},
            "100": {"seconds": [100.0, 20.0], "others": no_load},
        }
    )
    table = growth.make_growth_table(samples, "file", (1, 10, 100), [growth.Column("ms", "seconds", 1e3)])
    assert [row.what for row in table.rows] == [
        "1 file",
        "10 files",
        "100 files",
        "exponent of growth, 10 to 100 files",
    ]
    assert table.rows[2].cells == [Number(60_000, 20_000, 100_000)]
    assert table.rows[3].cells == [Number(1.5, 1, 2)]
    assert table.rows[3].json()["goal"] == {"bound": 1.1, "at_least": False}


def test_commands_read_the_many_and_long_runs_of_the_benchmarks(tmp_path: Path) -> None:
    runs.copy_runs(tmp_path / "many", 25)
    many = json.loads(in_process_calls.call_verb("status", f"--runs-folder={tmp_path}/many", "--json=1").stdout)
    assert len({run["run"] for run in many}) == 25
    assert {run["state"] for run in many} == {"finished", "failed"}

    runs.write_long_runs(tmp_path / "long", 2, 100)
    output = in_process_calls.call_verb("compare", f"--runs-folder={tmp_path}/long", "--json=1").stdout
    assert [run["step"] for run in json.loads(output)["runs"]] == [100, 100]
