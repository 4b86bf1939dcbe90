"""Image of a step of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.measure import plots
from common.techniques.pipeline import schedules
from common.techniques.pipeline.schedules import Span

ACTION_STYLES = {  # label of each kind of action, and its colors for even and odd microbatches
    "F": ("forward", ("#4878a8", "#7ba4cc")),
    "B": ("backward", ("#d1783a", "#e8a878")),
    "I": ("backward: gradient of the input", ("#d1783a", "#e8a878")),
    "W": ("backward: gradient of the weights", ("#6a9a52", "#9cc287")),
}


def draw_timeline(path: Path, lanes: Mapping[str, Sequence[Span]], title: str = "", x: str = "ms") -> None:
    """Draw a chart with one lane per stage and one bar per action; gaps between bars are idle time.

    `x` is the label of the axis, which counts thousandths of the times in `lanes`.
    Each bar is labeled with the number of its microbatch. If a bar is too narrow for the number, the number is drawn
    above the bar for a forward, and below the bar for any other action. Numbers that would overlap are omitted.
    """
    axes = plots.make_axes(9.0, 1.4 + 0.55 * len(lanes))
    timeline = list(lanes.values())
    step_start = schedules.find_first_start_time(timeline)
    length = schedules.compute_makespan(timeline)
    in_legend: set[str] = set()
    for row, spans in enumerate(timeline):
        next_free = {-1: -1.0, 1: -1.0}  # end of the last number above (-1) and below (1) the lane, in ms
        for (kind, _, microbatch), start, end in spans:
            name, colours = ACTION_STYLES[kind]
            left = (start - step_start) * 1e3
            width = (end - start) * 1e3
            label = None if name in in_legend else name
            in_legend.add(name)
            axes.barh(row, width, left=left, height=0.7, color=colours[microbatch % 2], label=label)

            number = str(microbatch)
            number_width = 8.5 * length * len(number)  # in ms, although `length` is in seconds
            middle = left + width / 2
            side = -1 if kind == "F" else 1
            if width > number_width:
                colour = "black" if microbatch % 2 else "white"  # black on the lighter color
                axes.text(middle, row, number, ha="center", va="center", color=colour, fontsize=8)
            elif middle - 0.4 * number_width > next_free[side]:
                axes.text(middle, row + 0.42 * side, number, ha="center", va="center", fontsize=6)
                next_free[side] = middle + 0.4 * number_width
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set(xlabel=x, xlim=(0, length * 1e3), ylim=(len(lanes) - 0.45, -0.55))  # the first lane is at the top
    axes.set_title(title, fontsize=10)
    legend_bottom = -0.32 if len(lanes) < 4 else -0.2
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, legend_bottom), ncols=3, frameon=False)
    plots.save_figure(axes, path)
