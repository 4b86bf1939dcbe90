"""Plots of measured numbers. matplotlib is imported only when the first plot is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BAR_COLOR = "#4878a8"
Points = Sequence[tuple[float, float, float]]
"""Points of a curve. A point consists of x, the mean of y, and the standard deviation of y."""
Fits = Mapping[str, tuple[str, Points]]
"""Curves that were fitted to measured series: the label and the points of each, by the label of the series."""
MAX_VERTICAL_BARS = 5
"""Maximum number of vertical bars. The labels of more bars would overlap, so these bars are horizontal."""
MAX_TICKS = 8
"""Maximum number of x values for which the x-axis has one tick per value."""


def make_axes(width: float = 7.0, height: float = 4.2) -> Any:
    """Return the axes of a new figure. Width and height are in inches."""
    import matplotlib

    matplotlib.use("Agg")  # the Agg backend needs no display
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def save_figure(axes: Any, path: Path) -> None:
    """Write a figure to a PNG or SVG file, and close the figure.

    The title of the figure is also stored in the metadata of the file.
    """
    from matplotlib import pyplot

    axes.figure.savefig(path, dpi=150, metadata={"Title": axes.get_title()})
    pyplot.close(axes.figure)


def save_with_legend(axes: Any, path: Path) -> None:
    """Add a grid and a legend to a figure, write the figure, and close it."""
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(axes, path)


def draw_dashed_curve(axes: Any, label: str, points: Points, color: str | None = None) -> None:
    """Add a dashed curve to a figure, by default in the next color of the figure."""
    x_values, heights, _ = zip(*sorted(points), strict=True)
    axes.plot(x_values, heights, linestyle="--", color=color, label=label)


def draw_curves(
    path: Path,
    series: Mapping[str, Points],
    x: str,
    y: str,
    levels: Mapping[str, float] | None = None,
    *,
    computed: Mapping[str, Points] | None = None,
    fits: Fits | None = None,
    log: bool = False,
    loglog: bool = False,
    title: str = "",
) -> None:
    """Draw curves through measured points with error bars, and write the plot to `path`.

    `series` contains the measured points by label, and `computed` contains the points of dashed curves by label. The
    dashed curves of `fits` have the colors of their series. `levels` contains the heights of horizontal lines by label.
    `log` selects a logarithmic x-axis with base 2, and with a tick at each measured x if there are at most MAX_TICKS of
    them. `loglog` selects logarithmic axes with base 10.
    """
    axes = make_axes()
    ticks: set[float] = set()
    for label, points in series.items():
        x_values, means, deviations = zip(*sorted(points), strict=True)
        container = axes.errorbar(x_values, means, deviations, marker="o", capsize=3, label=label)
        ticks |= {round(value, 3) for value in x_values}
        if fits and label in fits:
            draw_dashed_curve(axes, *fits[label], container.lines[0].get_color())

    for label, points in (computed or {}).items():
        draw_dashed_curve(axes, label, points)
    line_styles = itertools.cycle(("--", ":", "-."))
    for label, height in (levels or {}).items():
        axes.axhline(height, linestyle=next(line_styles), color="0.35", label=label)

    if log:
        axes.set_xscale("log", base=2)
        if 0 < len(ticks) <= MAX_TICKS:
            axes.set_xticks(sorted(ticks))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=x, ylabel=y, title=title)
    if loglog:
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()  # they would take up a fifth of an SVG file
    else:
        axes.set(ylim=(0, None))
    save_with_legend(axes, path)


def draw_bar_chart(path: Path, heights: Mapping[str, tuple[float, float]], y: str, *, title: str = "") -> None:
    """Draw a bar chart with error bars, and write the chart to `path`.

    `heights` contains the mean and the standard deviation of y for each label. The number beside a bar is the mean.
    """
    means, deviations = zip(*heights.values(), strict=True)
    if len(heights) <= MAX_VERTICAL_BARS:
        axes = make_axes()
        bars = axes.bar(list(heights), means, yerr=deviations, capsize=4, color=BAR_COLOR)
        axes.set(ylabel=y)
        axes.margins(y=0.12)  # space for the numbers above the bars
    else:
        axes = make_axes(height=1.2 + 0.4 * len(heights))
        bars = axes.barh(list(heights), means, xerr=deviations, capsize=4, color=BAR_COLOR)
        axes.set(xlabel=y)
        axes.invert_yaxis()  # the first bar is at the top
        axes.margins(x=0.12)
    axes.bar_label(bars, fmt=lambda mean: f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}", padding=3)
    axes.set(title=title)
    save_figure(axes, path)


def draw_times_by_size(folder: Path, curves: Mapping[str, tuple[Mapping[str, Points], Fits]]) -> None:
    """Plot time in microseconds against size in bytes, in one or more figures.

    `curves` contains, for each title of a figure, the measured curves and the fitted lines. The curves and
    the lines have the format of the arguments `series` and `fits` of `draw_curves`.
    """
    for name, (measured, fits) in curves.items():
        path = folder / f"{name.replace(' ', '_')}.png"
        draw_curves(path, measured, "bytes", "microseconds", fits=fits, loglog=True, title=name)
