"""Plots of measured numbers, as PNG files. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.schedules import Span

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
    save(at, path)


WORK = {  # what a kind of action is called, and its colours for even and odd microbatches
    "F": ("forward", ("#4878a8", "#7ba4cc")),
    "B": ("backward", ("#d1783a", "#e8a878")),
    "I": ("backward: gradient of the input", ("#d1783a", "#e8a878")),
    "W": ("backward: gradient of the weights", ("#6a9a52", "#9cc287")),
}


def timeline(path: Path, lanes: Mapping[str, Sequence[Span]], title: str = "") -> None:
    """One lane for each stage, a bar for each action with its microbatch's number; empty is waiting."""
    at = axes(9.0, 1.4 + 0.55 * len(lanes))
    start = min(span.start for spans in lanes.values() for span in spans)
    length = max(span.end for spans in lanes.values() for span in spans) - start
    told: set[str] = set()
    for row, spans in enumerate(lanes.values()):
        for (kind, _, microbatch), begin, end in spans:
            word, colours = WORK[kind]
            left, width = (begin - start) * 1e3, (end - begin) * 1e3
            label = None if word in told else word
            told.add(word)
            at.barh(row, width, left=left, height=0.7, color=colours[microbatch % 2], label=label)
            if width > 14 * length:  # in ms, of seconds: room for the number
                at.text(left + width / 2, row, str(microbatch), ha="center", va="center", color="white", fontsize=8)
    at.set_yticks(range(len(lanes)), list(lanes))
    at.set(xlabel="ms", xlim=(0, length * 1e3), title=title)
    at.invert_yaxis()
    at.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32 if len(lanes) < 4 else -0.2), ncols=3, frameon=False)
    save(at, path)
