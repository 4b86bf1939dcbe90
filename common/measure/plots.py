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
    """Write a figure as PNG and close it."""
    from matplotlib import pyplot

    at.figure.savefig(path, dpi=150)
    pyplot.close(at.figure)


TICKS = 8  # on an axis, each at a place that was measured


def curves(
    path: Path,
    series: Mapping[str, Points],
    x: str,
    y: str,
    levels: Mapping[str, float] | None = None,
    *,
    computed: Mapping[str, Points] | None = None,
    log: bool = False,
    title: str = "",
) -> None:
    """Lines through (x, mean, deviation) with error bars, `computed` ones dashed, and `levels` as horizontal lines.

    `log`: x in powers of 2, its ticks where something was measured unless that is at many places.
    """
    at = axes()
    for label, points in series.items():
        across, means, deviations = zip(*sorted(points), strict=True)
        at.errorbar(across, means, deviations, marker="o", capsize=3, label=label)
    for label, points in (computed or {}).items():
        across, heights, _ = zip(*sorted(points), strict=True)
        at.plot(across, heights, linestyle="--", label=label)
    for number, (label, height) in enumerate((levels or {}).items()):
        at.axhline(height, linestyle=("--", ":", "-.")[number % 3], color="0.35", label=label)
    if log:
        at.set_xscale("log", base=2)
        places = sorted({round(point[0], 3) for points in series.values() for point in points})
        if 0 < len(places) <= TICKS:
            at.set_xticks(places)
        at.xaxis.set_major_formatter("{x:g}")
    at.set(xlabel=x, ylabel=y, title=title, ylim=(0, None))
    at.grid(alpha=0.3)
    at.legend()
    save(at, path)


def bars(path: Path, heights: Mapping[str, tuple[float, float]], y: str, *, title: str = "") -> None:
    """One bar a label, of the mean and the deviation, with its number on top."""
    at = axes()
    means, deviations = zip(*heights.values(), strict=True)
    drawn = at.bar(list(heights), means, yerr=deviations, capsize=4, color="#4878a8")
    at.bar_label(drawn, fmt=lambda v: f"{v:,.0f}" if v >= 100 else f"{v:.3g}", padding=3)
    at.set(ylabel=y, title=title)
    at.margins(y=0.12)
    if len(heights) > 5:  # their labels would overlap side by side
        for label in at.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    save(at, path)
