"""Plots of measured numbers, as PNG files. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float, float]]


def axes(width: float = 7.0, height: float = 4.2) -> Any:
    """A figure's axes; drawing needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def save(at: Any, path: Path) -> None:
    from matplotlib import pyplot

    at.figure.savefig(path, dpi=150)
    pyplot.close(at.figure)


def curves(
    path: Path,
    series: Mapping[str, Points],
    x: str,
    y: str,
    levels: Mapping[str, float] | None = None,
    *,
    log: bool = False,
    title: str = "",
) -> None:
    """Lines through (x, mean, deviation) with error bars, and `levels` as horizontal lines. `log`: x in powers of 2."""
    at = axes()
    for label, points in series.items():
        across, means, deviations = zip(*sorted(points), strict=True)
        at.errorbar(across, means, deviations, marker="o", capsize=3, label=label)
    for number, (label, height) in enumerate((levels or {}).items()):
        at.axhline(height, linestyle=("--", ":", "-.")[number % 3], color="0.35", label=label)
    if log:
        at.set_xscale("log", base=2)
    at.set(xlabel=x, ylabel=y, title=title, ylim=(0, None))
    at.grid(alpha=0.3)
    at.legend()
    save(at, path)


def bars(path: Path, heights: Mapping[str, tuple[float, float]], y: str, *, title: str = "") -> None:
    """One bar a label, of the mean and the deviation, with its number on top."""
    at = axes()
    means, deviations = zip(*heights.values(), strict=True)
    drawn = at.bar(list(heights), means, yerr=deviations, capsize=4, color="#4878a8")
    at.bar_label(drawn, fmt="%.3g", padding=3)
    at.set(ylabel=y, title=title)
    at.margins(y=0.12)
    save(at, path)
