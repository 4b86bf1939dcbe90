"""The sweep of sparse_prune: accuracy against sparsity, for every criterion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from configs.sparse_prune import Config
from configs.sweeps import Cell, Curves, Grid, Row, Summary, average_rows

BY = ("criterion", "sparsity")


def list_points(cfg: Config, gpus: int) -> list[Cell]:
    """Return the dense model, and every criterion at every sparsity. n:m has one sparsity, and rigl one criterion."""
    plain: Cell = {"export": False, "int8": False}
    names = ["magnitude"] if cfg.schedule == "rigl" else cfg.criteria
    levels = [cfg.sparsity] if cfg.scope == "n:m" else [float(level) for level in cfg.levels]
    grid = [plain | {"criterion": name, "sparsity": level} for level in levels for name in names]
    return [plain | {"schedule": "none", "l1": 0}, *grid]


def summarize_runs(cfg: Config, gpus: int, rows: list[Row]) -> Summary:
    """Report test error against the weights that are left, and the medians of all that was measured."""
    dense = {row["cell"]["seed"]: row["test_accuracy"] for row in rows if "criterion" not in row["cell"]}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        cell, score = row["cell"], row["test_accuracy"]
        row |= {"error": 100 * (1 - score), "left": 100 * row["nonzero"] / row["weights"]}
        row["below"] = 100 * (dense.get(cell["seed"], math.nan) - score)  # points, for the same seed
        name = f"{cell['criterion']} {100 * cell['sparsity']:.4g} %" if "criterion" in cell else "dense"
        groups.setdefault(name, []).append(row)
    pruned = [row for row in rows if "criterion" in row["cell"]]
    left = average_rows(pruned, BY, "left")
    series: dict[str, list[tuple[float, float, float]]] = {}
    for found, (mean, deviation, _) in average_rows(pruned, BY, "error").items():
        series.setdefault(found[0], []).append((left[found][0], mean, deviation))
    levels = {"dense": fmean(row["error"] for row in groups["dense"])} if "dense" in groups else {}
    title = f"{cfg.model} on {rows[0]['data']}"
    plot = Curves("sparsity.png", series, "weights left, %", "test error, %", levels, title=title)
    return Summary({"medians": format_medians(groups), "CSR": report_csr_speed(groups)}, [plot])


COLUMNS = {  # of a sweep's table: what, its head, and how its numbers are written
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
    """Return the medians of each group of results, a line each."""
    width = max(map(len, groups))
    lines = [f"    {'':<{width}}  {'  '.join(head for head, _ in COLUMNS.values())}  runs"]
    for name, found in groups.items():
        values = {key: median(row[key] for row in found) * (1e3 if "seconds" in key else 1) for key in COLUMNS}
        numbers = "  ".join(text.format(values[key] + 0.0) for key, (_, text) in COLUMNS.items())
        lines.append(f"    {name:<{width}}  {numbers}  {len(found):>4}")
    return "\n".join(lines)


def report_csr_speed(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Report where sparse kernels are slower than dense ones, and where the repeats do not agree on it."""
    told = []
    for dense in ("fp32", "bf16"):
        slower, unclear = list[str](), list[str]()
        for name, rows in groups.items():
            ratios = [row["csr_seconds"] / row[f"{dense}_seconds"] for row in rows]
            if name != "dense" and max(ratios) > 1:
                (slower if min(ratios) > 1 else unclear).append(name)
        told.append(
            f"slower than dense {dense} for {', '.join(slower)}" if slower else f"nowhere slower than dense {dense}"
        )
        told += [f"now slower, now faster for {', '.join(unclear)}"] if unclear else []
    return "; ".join(told)


GRID = Grid(list_points, summarize_runs, new_seeds=True)
