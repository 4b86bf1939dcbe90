"""Comparison of all strategies of an experiment, for the parts NAME/strategies of several experiments.

The runs are those of `make sweep GRID=configs/sweeps/strategies.py`. In each round, every strategy runs once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common.config import config
from common.measure.labeled_points import draw_labeled_points
from configs.strategies import Strategies
from configs.sweeps import strategies as strategy_grid
from slurm.reports import strategies as strategy_report
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, discard_run, finish
from tests.benchmarks.records import Cell, Row, Table

RANKS = 2
"""Number of ranks. On two cores, the times of more ranks would show how the ranks share a core."""
COLUMNS = (
    "memory of a rank, MB",
    "memory vs. formula, %",
    "of these activations, MB",
    "MB sent per step",
    "sent vs. formula, %",
    "idle, %",
    "loss difference",
)
DEVIATION = "_deviation"
"""End of the names of numbers that are relative deviations from formulas."""
FACTORS = {
    "memory": 1e-6,
    "memory_deviation": 100,
    "activations": 1e-6,
    "sent": 1e-6,
    "sent_deviation": 100,
    "idle": 100,
}
"""Factors of the numbers of a run in the table."""


def get_strategies(name: str) -> Strategies:
    strategies = config.import_schema(name).strategies
    assert strategies is not None
    return strategies


class StrategyComparison:
    """The runs of all strategies of an experiment, and their table."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: dict[str, list[str]] = {}
        """Settings of each strategy. The first strategy is one process."""
        self.runs: dict[str, strategy_report.StrategyRun] = {}
        """Newest run of each strategy. Runs of a strategy in different rounds have the same losses."""

    @property
    def reference(self) -> str:
        """Label of one process, with which the other strategies are compared."""
        return next(iter(self.settings))

    def list_tasks(self, scratch: Path) -> list[Task]:
        """Return a run of each strategy."""
        strategies = get_strategies(self.name)
        for point in strategy_grid.list_points(strategies, RANKS):
            settings = {**strategy_grid.SETTINGS, **strategies.run, **point}
            self.settings[strategies.format_label(point)] = [f"{key}={value}" for key, value in settings.items()]
        return [self._make_task(scratch, label) for label in self.settings]

    def _make_task(self, scratch: Path, label: str) -> Task:
        def run(_: int) -> dict[str, float]:
            measured = self._train(scratch, label)
            if self.reference not in self.runs:  # a continued benchmark starts with another strategy
                self._train(scratch, self.reference)
            return list_numbers(measured, self.runs[self.reference])

        return Task(label, run)

    def _train(self, scratch: Path, label: str) -> strategy_report.StrategyRun:
        folder = finish(scratch, label, self.name, *self.settings[label])
        run = strategy_report.read_run(folder)
        assert run is not None
        discard_run(folder)
        self.runs[label] = run
        return run

    def make_table(self, samples: Samples) -> Table:
        """Return one row per strategy. The page shows the first ones and folds the others."""
        rows = []
        for label in sort_labels(list(samples.values), get_strategies(self.name)):
            columns = samples.values[label]
            cells: list[Cell] = [samples.number(label, factor=1e3)]
            for column, factor in FACTORS.items():
                cells.append(make_cell(samples, label, column, factor) if column in columns else "-")
            pairs = zip(self.runs[label].losses, self.runs[self.reference].losses, strict=True)
            difference = max(abs(loss - expected) for loss, expected in pairs)
            cells.append(f"{difference:.1g}")
            rows.append(Row(label, cells))
        return Table(("strategy", "ms per step", *COLUMNS), rows)


def list_numbers(run: strategy_report.StrategyRun, process: strategy_report.StrategyRun) -> dict[str, float]:
    """Return the numbers of a run for the record. `process` is the run of one process."""
    numbers = {
        "seconds": median(run.step_seconds),
        "memory": run.memory_bytes or 0.0,
        "activations": run.activation_bytes,
        "sent": run.sent_bytes,
    }
    further = {
        "idle": run.idle_share,
        "memory_deviation": run.compute_memory_deviation(process),
        "sent_deviation": run.compute_sent_deviation(),
    }
    return numbers | {name: value for name, value in further.items() if value is not None}


def make_cell(samples: Samples, label: str, column: str, factor: float) -> Cell:
    """Return the median of a column, or the largest deviation from a formula, without its sign."""
    if not column.endswith(DEVIATION):
        return samples.number(label, column, factor)
    largest = max(abs(number) for number in samples.list_counted(label, column))
    return f"{factor * largest:.2f}"


def sort_labels(labels: Sequence[str], strategies: Strategies) -> list[str]:
    """Return the labels of strategies with the default of each division first, and those with an option last."""
    options = set()
    for option in strategies.options:
        options |= {f"{name}={value}" for name, value in option.items()}
    division_counts: Counter[tuple[str, ...]] = Counter()
    order = {}
    for label in labels:
        words = label.split()
        names = [word.partition("=")[0] for word in words]
        division = tuple(name for name in names if name in strategies.degrees)
        has_option = not options.isdisjoint(words)
        order[label] = (has_option, 0 if has_option else division_counts[division])
        division_counts[division] += 1
    return sorted(labels, key=lambda label: order[label])


def describe_ranks() -> str:
    """Return the number of ranks and cores."""
    cores = len(os.sched_getaffinity(0))
    crowded = " (oversubscribed)" if cores < RANKS else ""
    return f"one process with {cores} threads, and {RANKS} ranks on {cores} cores{crowded}"


def describe_settings(name: str) -> str:
    """Return the settings of all runs."""
    settings = {**strategy_grid.SETTINGS, **get_strategies(name).run}
    cfg = config.load_config(config.import_schema(name), [f"{key}={value}" for key, value in settings.items()])
    return f"settings of all runs: {strategy_grid.format_fixed_settings(cfg, settings)}"


def make_part(name: str) -> Part:
    """Return the comparison of all strategies of an experiment."""
    comparison = StrategyComparison(name)
    title = f"one process and every strategy of {RANKS} ranks"
    facts = (describe_ranks(), describe_settings(name))
    return Part(f"{name}/strategies", title, comparison.list_tasks, comparison.make_table, facts=facts)


def make_figures(name: str) -> dict[str, Figure]:
    """Return the figure of time against memory of the part."""

    def draw(path: Path, part: Mapping[str, Any]) -> None:
        points = {}
        for label, columns in part["samples"].items():
            points[label] = (median(columns["memory"]) / 1e6, 1e3 * median(columns["seconds"]))
        title = f"{name}: {part['facts'][0]}"
        draw_labeled_points(path, points, "memory of a rank, MB", "ms per step", title=title)

    return {f"{name}_strategies": (f"{name}/strategies", draw)}
