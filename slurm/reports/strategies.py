"""Table and figure of runs with the same model and different strategies. This module does not import torch.

Each run is an ordinary run with `log.memory`. Its times and losses are read from metrics.jsonl, its memory and messages
from result.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from common.measure.labeled_points import draw_labeled_points
from common.measure.steady_steps import select_steady_steps
from common.runs import provenance
from common.runs.compare.compare_table import get_terminal_width
from common.runs.folder import RunFolder, read_json
from common.runs.result import Result, parse_result, to_finite_number
from common.system.text import format_count
from slurm.reports.strategy_formulas import RankFormulas, compute_deviation, format_deviation

FIGURE = "strategies.svg"
MISSING = "-"
MIN_WIDTH = 140
"""Width of the table in characters on narrower terminals, where its lines are wrapped."""
LABEL_WIDTH = 25
"""Minimum width of the first column, in characters. No setting of a strategy is longer."""
CROWDED = "*"
"""Mark of ranks that share cores."""
SIMILAR = 1.01
"""Factor within which memory and messages of two strategies are equal. The faster one is then recommended."""


@dataclass(frozen=True)
class StrategyRun:
    """Measurements of one finished run."""

    repeat: int
    """Round of the run. Losses are compared with those of one process in the same round."""
    ranks: int
    threads: int
    """Number of CPU threads of each rank."""
    host_cores: int
    """Number of cores of the host if all ranks ran on the CPUs of one host, otherwise 0."""
    step_seconds: Sequence[float]
    """Durations of the steps after the warm-up."""
    losses: Sequence[float]
    """Loss of each step."""
    samples_per_step: float
    tokens_per_sample: float
    """Number of tokens of a sample, or 0 if samples are not texts."""
    state_bytes: float | None
    """Training state of the rank that needs most memory; None if the run has not measured its memory."""
    activation_bytes: float
    """Activations of the same rank."""
    sent_bytes: float
    """Bytes that a rank sends in a step; the largest number of any rank."""
    idle_share: float | None
    """Share of time (0 to 1) that ranks wait, if the run has measured it."""
    formulas: RankFormulas = field(default_factory=RankFormulas)
    """Values of the formulas for memory and messages."""
    is_resumed: bool = False
    """Whether the run was interrupted and resumed. Its steps then contain two warm-ups."""

    @property
    def is_oversubscribed(self) -> bool:
        """Whether the host has fewer cores than ranks."""
        return 0 < self.host_cores < self.ranks

    @property
    def memory_bytes(self) -> float | None:
        """Training state and activations of the rank that needs most memory."""
        return None if self.state_bytes is None else self.state_bytes + self.activation_bytes

    def compute_memory_deviation(self, process: StrategyRun | None) -> float | None:
        """Return the relative difference of the memory from its formula, or None without a formula.

        Without a formula for activations, they are compared with those of the run of one process.
        """
        activations = process.activation_bytes if process is not None else None
        return compute_deviation(self.memory_bytes, self.formulas.predict_memory(activations))

    def compute_sent_deviation(self) -> float | None:
        """Return the relative difference of the sent bytes from their formula, or None without a formula."""
        return compute_deviation(self.sent_bytes, self.formulas.sent_bytes)


def read_run(folder: RunFolder, repeat: int = 0) -> StrategyRun | None:
    """Return the measurements of a run, or None if it has not finished or had too few steps."""
    result = parse_result(folder.result)
    attempts = folder.list_attempts()
    rows = [row for row in folder.read_metrics() if to_finite_number(row.get("loss")) is not None]
    timed = [row for row in rows if row.get("step_time")]
    if result.state != "finished" or not attempts or not timed:
        return None
    world = read_json(attempts[-1].attempt_folder / "world.json")
    state, activations, sent = find_largest_rank(result)
    return StrategyRun(
        repeat=repeat,
        ranks=int(world.get("processes", 1)),
        threads=int(world.get("threads", 1)),
        host_cores=count_host_cores(folder, world),
        step_seconds=select_steady_steps([row["step_time"] for row in timed]),
        losses=[row["loss"] for row in rows],
        samples_per_step=rows[0]["samples"] / rows[0]["global_step"],
        tokens_per_sample=compute_tokens_per_sample(result),
        state_bytes=state,
        activation_bytes=activations,
        sent_bytes=sent,
        idle_share=result.compute_waiting_share(),
        formulas=RankFormulas.read(result),
        is_resumed=len(folder.list_attempt_parts()) > 1,
    )


def find_largest_rank(result: Result) -> tuple[float | None, float, float]:
    """Return state and activations of the rank that needs most memory, and the most bytes that a rank sends."""
    measured = result.measured
    states = measured.get("rank_state_bytes") or []
    activations = measured.get("rank_activation_bytes") or []
    pairs = list(zip(states, activations, strict=False))
    if not pairs:
        return None, 0.0, 0.0
    state, activation = max(pairs, key=sum)
    return float(state), float(activation), float(max(measured.get("rank_sent_bytes") or [0]))


def count_host_cores(folder: RunFolder, world: Mapping[str, Any]) -> int:
    """Return the number of cores if all ranks ran on the CPUs of the host that started the run, otherwise 0."""
    machine = provenance.read_metadata(folder).get("machine", {})
    is_local = set(world.get("hosts", [])) == {machine.get("host")}
    return int(machine.get("cores", 0)) if is_local and world.get("device") == "cpu" else 0


def compute_tokens_per_sample(result: Result) -> float:
    """Return the number of tokens of a sample, or 0 if the run has not measured tokens."""
    tokens = result.find_number("tokens_per_second")
    samples = result.find_number("samples_per_second")
    return tokens / samples if tokens and samples else 0.0


@dataclass(frozen=True)
class StrategySummary:
    """Row of the table: a strategy, over all of its runs."""

    label: str
    runs: Sequence[StrategyRun]
    loss_difference: float | None
    """Largest difference of a loss from that of one process at the same step; None without a run to compare."""
    memory_deviations: Sequence[float | None] = ()
    """Relative difference of each run's memory from its formula."""

    @property
    def times(self) -> list[float]:
        """Durations of the steps of all runs, in ms."""
        milliseconds: list[float] = []
        for run in self.runs:
            milliseconds += [1e3 * seconds for seconds in run.step_seconds]
        return milliseconds

    @property
    def milliseconds(self) -> float:
        """Median duration of a step."""
        return median(self.times)

    @property
    def memory_megabytes(self) -> float | None:
        """Training state and activations of the rank that needs most memory, in MB (1e6 bytes)."""
        sizes = [run.memory_bytes for run in self.runs]
        return max((size for size in sizes if size is not None), default=0) / 1e6 if None not in sizes else None

    @property
    def sent_megabytes(self) -> float:
        """Bytes that a rank sends in a step, in MB (1e6 bytes)."""
        return max(run.sent_bytes for run in self.runs) / 1e6

    @property
    def is_resumed(self) -> bool:
        """Whether a run was interrupted and resumed."""
        return any(run.is_resumed for run in self.runs)

    def format_cells(self) -> list[str]:
        """Return the cells of the row, in the order of `list_heads`."""
        run = self.runs[0]
        per_second = run.samples_per_step / (self.milliseconds / 1e3) * (run.tokens_per_sample or 1)
        activations = memory = MISSING
        if self.memory_megabytes is not None:
            activations = f"{run.activation_bytes / 1e6:,.1f}"
            memory = f"{self.memory_megabytes:,.1f}"
        shares = [run.idle_share for run in self.runs if run.idle_share is not None]
        return [
            self.label,
            f"{run.ranks}{CROWDED}" if run.is_oversubscribed else str(run.ranks),
            format_times(self.times),
            f"{per_second:,.0f}",
            memory,
            format_deviation(self.memory_deviations, MISSING),
            activations,
            format_megabytes(self.sent_megabytes),
            format_deviation([run.compute_sent_deviation() for run in self.runs], MISSING),
            f"{fmean(shares):.0%}" if shares else MISSING,
            f"{self.loss_difference:.1g}" if self.loss_difference is not None else MISSING,
        ]


def list_heads(run: StrategyRun) -> list[str]:
    """Return the heads of the columns."""
    per_second = "tokens/s" if run.tokens_per_sample else "samples/s"
    memory = ["memory,\nMB", "memory vs.\nformula", "of these\nactivations"]
    sent = ["sent,\nMB", "sent vs.\nformula"]
    return ["strategy", "ranks", "ms per step", per_second, *memory, *sent, "idle", "loss\ndifference"]


def format_megabytes(size: float) -> str:
    """Return a size in MB with two decimal places, or with two digits if it is small."""
    return f"{size:,.2f}" if size >= 0.1 else f"{size:.2g}"


def format_times(milliseconds: Sequence[float]) -> str:
    """Return the median and the quartiles, as in `529 [512..547]`."""
    digits = ",.0f" if median(milliseconds) >= 100 else ",.3g"
    if len(milliseconds) < 2:
        return format(milliseconds[0], digits)
    low, middle, high = quantiles(milliseconds, n=4, method="inclusive")
    return f"{middle:{digits}} [{low:{digits}}..{high:{digits}}]"


def summarize(runs: Mapping[str, Sequence[StrategyRun]], process: str = "one process") -> list[StrategySummary]:
    """Return the rows of the table for the runs of each strategy, by label.

    Losses and activations are compared with those of the strategy with the label `process`, if it has runs.
    """
    reference = {run.repeat: run for run in runs.get(process, ())}
    summaries = []
    for label, members in runs.items():
        differences = []
        deviations = []
        for run in members:
            expected_run = reference.get(run.repeat)
            for loss, expected in zip(run.losses, expected_run.losses if expected_run else (), strict=False):
                differences.append(abs(loss - expected))
            deviations.append(run.compute_memory_deviation(expected_run))
        summaries.append(StrategySummary(label, members, max(differences, default=None), deviations))
    return summaries


def print_report(
    experiment: str,
    runs: Mapping[str, Sequence[StrategyRun]],
    folder: Path,
    settings: str = "",
    process: str = "one process",
) -> None:
    """Print the table and the answers, and draw the figure in a folder. `runs` has at least two strategies.

    `settings` names the settings that all runs share. `process` is the label of the runs of one process.
    """
    from rich.console import Console  # imported here because most commands print no such table
    from rich.table import Table

    rows = summarize(runs, process)
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("#", justify="right", no_wrap=True)
    heads = list_heads(rows[0].runs[0])
    for head in heads:
        if head == heads[0]:
            table.add_column(head, overflow="fold", min_width=LABEL_WIDTH)
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *row.format_cells())
    console = Console(width=max(MIN_WIDTH, get_terminal_width()), highlight=False)
    console.print(table)
    if settings:
        print(f"settings of all runs: {settings}")
    print(describe_measurement(rows))
    for question, answer in answer_questions(rows).items():
        print(f"  {question:<22} {answer}")
    if all(row.memory_megabytes is not None for row in rows):
        path = folder / FIGURE
        draw_figure(path, experiment, rows)
        print(f"  {'figure':<22} {path.absolute().as_uri()}", flush=True)


def describe_measurement(rows: Sequence[StrategySummary]) -> str:
    """Return the caption: number of steps and rounds, and what the columns mean."""
    runs: list[StrategyRun] = []
    for row in rows:
        runs += row.runs
    steps = sorted({len(run.step_seconds) for run in runs})
    rounds = max(len(row.runs) for row in rows)
    number = " to ".join(str(count) for count in dict.fromkeys((steps[0], steps[-1])))
    lines = [
        f"step time: median [quartiles] of {number} steps after the warm-up, in {format_count(rounds, 'round')}",
        "memory: training state and activations of the rank that needs most memory",
        "sent: bytes per step of the rank that sends most",
        "vs. formula: difference in percent of the measured bytes from a formula; without a formula for activations, "
        "the rank's share of the activations of one process is used",
        "idle: share of time in which ranks wait for other stages, or for messages that do not overlap with "
        f"computation; {MISSING} if the experiment does not measure it for a strategy",
        "loss difference: largest difference of a step's loss from that of one process",
    ]
    if rounds == 1:
        lines.append("with one round, times are affected by other programs; use ROUNDS=5 before you compare them")
    resumed = [row.label for row in rows if row.is_resumed]
    if resumed:
        lines.append(f"resumed after an interruption, so their times are less accurate: {', '.join(resumed)}")
    threads = {(run.ranks, run.threads) for run in runs}
    if len({count for _, count in threads}) > 1:
        texts = [f"{count} with {format_count(ranks, 'rank')}" for ranks, count in sorted(threads)]
        lines.append(f"threads per rank: {', '.join(texts)}")
    crowded = [run for run in runs if run.is_oversubscribed]
    if crowded:
        run = crowded[0]
        lines.append(f"{CROWDED} oversubscribed: {run.ranks} ranks share {format_count(run.host_cores, 'core')}")
    return "\n".join(lines)


def answer_questions(rows: Sequence[StrategySummary]) -> dict[str, str]:
    """Return the best strategies for common questions: speed, memory, and a slow link."""
    answers = {"fastest": format_best(rows, [row.milliseconds for row in rows])}
    memory = [row.memory_megabytes for row in rows]
    if None not in memory:
        answers["least memory per rank"] = format_best(rows, [size or 0.0 for size in memory])
        # One process sends nothing, and is no answer for several hosts.
        if any(row.sent_megabytes for row in rows):
            answers["fewest bytes sent"] = format_best(rows, [row.sent_megabytes or math.inf for row in rows])
    return answers


def format_best(rows: Sequence[StrategySummary], values: Sequence[float]) -> str:
    """Return the number and the label of the fastest row whose value is at most SIMILAR times the smallest value.

    The numbers of the other rows with such values are listed.
    """
    limit = SIMILAR * min(values)
    best = [number for number, value in enumerate(values, 1) if value <= limit]
    fastest = min(best, key=lambda number: rows[number - 1].milliseconds)
    similar_rows = ", ".join(str(number) for number in best if number != fastest)
    equal = f" (within {SIMILAR - 1:.0%}: {similar_rows})" if similar_rows else ""
    return f"{fastest}: {rows[fastest - 1].label}{equal}"


def draw_figure(path: Path, experiment: str, rows: Sequence[StrategySummary]) -> None:
    """Draw the time of a step against the memory of a rank, with one numbered point per strategy."""
    points = {row.label: (row.memory_megabytes or 0.0, row.milliseconds) for row in rows}
    run = max((row.runs[0] for row in rows), key=lambda run: run.ranks)
    crowded = f" on {format_count(run.host_cores, 'core')} (oversubscribed)" if run.is_oversubscribed else ""
    title = f"{experiment}: one process and {format_count(run.ranks, 'rank')}{crowded}"
    draw_labeled_points(path, points, "memory of a rank, MB", "ms per step", title=title)
