"""Sweep of sparse_prune: accuracy as a function of sparsity for every pruning criterion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from configs.sparse_prune import Config
from configs.sweeps import Curves, PointSettings, RunRow, Summary, SweepGrid, average_rows

BY = ("criterion", "sparsity")


def list_points(cfg: Config, gpus: int) -> list[PointSettings]:
    """Return one point for the dense model, and one for every criterion at every sparsity.

    With scope=n:m, the only sparsity is that of the pattern. With schedule=rigl, the only criterion is magnitude.
    """
    criteria = ["magnitude"] if cfg.schedule == "rigl" else cfg.criteria
    sparsities = [cfg.sparsity] if cfg.scope == "n:m" else [float(level) for level in cfg.levels]
    training_only: PointSettings = {"export": False, "int8": False}
    points = [training_only | {"schedule": "none", "l1": 0}]
    for sparsity in sparsities:
        for criterion in criteria:
            points.append(training_only | {"criterion": criterion, "sparsity": sparsity})
    return points


def summarize_runs(cfg: Config, gpus: int, rows: list[RunRow]) -> Summary:
    """Plot the test error against the share of remaining weights, and report medians."""
    accuracies = [row.get("test_accuracy", math.nan) for row in rows]  # a regression has no accuracy
    dense_accuracies = {}
    for row, accuracy in zip(rows, accuracies, strict=True):
        if "criterion" not in row["cell"]:
            dense_accuracies[row["cell"]["seed"]] = accuracy
    groups: dict[str, list[RunRow]] = {}
    pruned = []
    for row, accuracy in zip(rows, accuracies, strict=True):
        cell = row["cell"]
        row["error"] = 100 * (1 - accuracy)
        row["left"] = 100 * row["nonzero"] / row["weights"]  # percentage of remaining weights
        # percentage points below the dense model that was trained with the same seed
        row["below"] = 100 * (dense_accuracies.get(cell["seed"], math.nan) - accuracy)
        name = "dense"
        if "criterion" in cell:
            name = f"{cell['criterion']} {100 * cell['sparsity']:.4g} %"
            pruned.append(row)
        groups.setdefault(name, []).append(row)

    remaining = average_rows(pruned, BY, "left")
    series: dict[str, list[tuple[float, float, float]]] = {}
    for point, error in average_rows(pruned, BY, "error").items():
        criterion = point[0]
        series.setdefault(criterion, []).append((remaining[point].mean, error.mean, error.deviation))
    levels = {"dense": fmean(row["error"] for row in groups["dense"])} if "dense" in groups else {}
    title = f"{cfg.model} on {rows[0]['data']}"
    plot = Curves("sparsity.png", series, "remaining weights, %", "test error, %", levels, title=title)
    return Summary({"medians": format_medians(groups), "CSR": describe_csr_speed(groups)}, [plot])


COLUMNS = {  # columns of a sweep's table: heading and number format of each result
    "test_accuracy": ("accuracy", "{:8.2%}"),
    "below": ("below dense", "{:11.2f}"),
    "nonzero": ("  non-zero", "{:10,.0f}"),
    "bytes_raw": ("     bytes", "{:10,.0f}"),
    "bytes_compressed": ("compressed", "{:10,.0f}"),
    "bytes_csr": ("    in CSR", "{:10,.0f}"),
    "fp32_seconds": ("fp32 ms", "{:7.3f}"),
    "bf16_seconds": ("bf16 ms", "{:7.3f}"),
    "csr_seconds": (" CSR ms", "{:7.3f}"),
}


def format_medians(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Format the medians of each group of results, with one line per group."""
    width = max(map(len, groups))
    headings = "  ".join(heading for heading, _ in COLUMNS.values())
    lines = [f"    {'':<{width}}  {headings}  runs"]
    for name, rows in groups.items():
        cells = []
        for key, (heading, number_format) in COLUMNS.items():
            numbers = [row[key] for row in rows if key in row]  # custom networks may not support bf16 or CSR
            scale = 1e3 if "seconds" in key else 1
            cell = number_format.format(median(numbers) * scale + 0.0) if numbers else "-"  # 0.0 turns -0 into 0
            cells.append(cell.rjust(len(heading)))
        lines.append(f"    {name:<{width}}  {'  '.join(cells)}  {len(rows):>4}")
    return "\n".join(lines)


def describe_csr_speed(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Describe for which groups CSR kernels are slower than dense kernels.

    A group is inconclusive if CSR kernels are slower in some of its runs and faster in others.
    """
    clauses = []
    for dtype in ("fp32", "bf16"):
        slower = []
        unclear = []
        for name, rows in groups.items():
            timed = [row for row in rows if {"csr_seconds", f"{dtype}_seconds"} <= row.keys()]
            ratios = [row["csr_seconds"] / row[f"{dtype}_seconds"] for row in timed]
            if name == "dense" or max(ratios, default=0) <= 1:
                continue
            if min(ratios) > 1:
                slower.append(name)
            else:
                unclear.append(name)
        if slower:
            clauses.append(f"slower than dense {dtype} for {', '.join(slower)}")
        else:
            clauses.append(f"never slower than dense {dtype}")
        if unclear:
            clauses.append(f"inconclusive (varies between seeds) for {', '.join(unclear)}")
    return "; ".join(clauses)


GRID = SweepGrid(list_points, summarize_runs, new_seeds=True)
