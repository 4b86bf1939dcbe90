"""Plots of measured numbers, as PNG files. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float, float]]


def make_axes(width: float = 7.0, height: float = 4.2) -> Any:
    """Return the axes of a new figure, whose size is in inches; drawing needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def save_figure(at: Any, path: Path) -> None:
    """Write a figure as PNG or SVG, with its title as metadata, too, and close it."""
    from matplotlib import pyplot

    at.figure.savefig(path, dpi=150, metadata={"Title": at.get_title()})
    pyplot.close(at.figure)


def save_with_legend(at: Any, path: Path) -> None:
    """Add a grid and a legend to a figure, write and close it."""
    at.grid(alpha=0.3)
    at.legend()
    save_figure(at, path)


TICKS = 8  # at most, one for each x that was measured


def draw_curves(
    path: Path,
    series: Mapping[str, Points],
    x: str,
    y: str,
    levels: Mapping[str, float] | None = None,
    *,
    computed: Mapping[str, Points] | None = None,
    log: bool = False,
    loglog: bool = False,
    title: str = "",
) -> None:
    """Draw lines through points (x, mean, deviation) with error bars.

    `computed` lines are dashed, `levels` horizontal. `log`: x in powers of 2, with a tick for each measured x unless
    these are many; `loglog`: both axes in powers of 10.
    """
    at = make_axes()
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
        ticks = sorted({round(point[0], 3) for points in series.values() for point in points})
        if 0 < len(ticks) <= TICKS:
            at.set_xticks(ticks)
        at.xaxis.set_major_formatter("{x:g}")
    at.set(xlabel=x, ylabel=y, title=title)
    if loglog:
        at.set(xscale="log", yscale="log")
    else:
        at.set(ylim=(0, None))
    save_with_legend(at, path)


def draw_bars(path: Path, heights: Mapping[str, tuple[float, float]], y: str, *, title: str = "") -> None:
    """Draw a bar for each label, of the mean and the deviation, with its number on top."""
    at = make_axes()
    means, deviations = zip(*heights.values(), strict=True)
    drawn = at.bar(list(heights), means, yerr=deviations, capsize=4, color="#4878a8")
    at.bar_label(drawn, fmt=lambda v: f"{v:,.0f}" if v >= 100 else f"{v:.3g}", padding=3)
    at.set(ylabel=y, title=title)
    at.margins(y=0.12)
    if len(heights) > 5:  # their labels would overlap side by side
        for label in at.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    save_figure(at, path)


def draw_times_by_size(folder: Path, curves: Mapping[str, tuple[Mapping[str, Points], Mapping[str, Points]]]) -> None:
    """Draw time in microseconds against size in bytes, a figure in the folder for each name.

    `curves` holds the measured curves by their labels, and the fitted lines, as `draw_curves` takes them.
    """
    for name, (measured, fitted) in curves.items():
        path = folder / f"{name.replace(' ', '_')}.png"
        draw_curves(path, measured, "bytes", "microseconds", computed=fitted, loglog=True, title=name)
