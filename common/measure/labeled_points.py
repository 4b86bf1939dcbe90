"""Figure of labeled points. matplotlib is imported only when the first figure is drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.measure.plots import BAR_COLOR, make_axes, save_figure

BEST_COLOR = "#b8561b"
WIDTH_INCHES = 5.5
AXES_INCHES = 3.6
LABEL_LINE_INCHES = 0.155
"""Height of a line in the list of labels."""
FONT_POINTS = 8
MARKER_POINTS = 5
TICK_DIGITS = (1, 2, 3, 5, 7)
MIN_TICKS = 3
"""Minimum number of ticks of an axis with the first digits TICK_DIGITS. If there are fewer, ticks are equidistant."""
DISTANCES = (9, 14, 20, 27, 35, 44, 54)
"""Distances in points at which the number of a point may be drawn. Numbers near the point are tried first."""
ANGLES = (0, 45, 90, 135, 180, 225, 270, 315, 22, 67, 112, 157, 202, 247, 292, 337)
"""Directions of a number from its point, in degrees."""
Point = tuple[float, float]


class Box(NamedTuple):
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )


def make_box(center: Point, width: float, height: float) -> Box:
    """Return the rectangle with this center and size."""
    x, y = center
    return Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def draw_labeled_points(path: Path, points: Mapping[str, Point], x: str, y: str, *, title: str = "") -> None:
    """Draw one numbered point (x, y) per label, and list the labels by number below the axes.

    Both axes are logarithmic. A point is highlighted if no other point is at most as large in both directions. A line
    connects these points.
    """
    list_inches = LABEL_LINE_INCHES * (len(points) + 1)
    axes = make_axes(WIDTH_INCHES, AXES_INCHES + list_inches)
    from matplotlib import rc_context, ticker  # after make_axes, which selects the backend

    figure = axes.figure
    list_share = list_inches / (AXES_INCHES + list_inches)
    figure.get_layout_engine().set(rect=(0, list_share, 1, 1 - list_share))  # left, bottom, width, height
    best = select_smallest(points)
    frontier = sorted(points[label] for label in best)
    axes.step(*zip(*frontier, strict=True), where="post", color=BEST_COLOR, alpha=0.5, zorder=1)
    for label, point in points.items():
        axes.plot(*point, "o", color=BEST_COLOR if label in best else BAR_COLOR, markersize=MARKER_POINTS)
    axes.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
    axes.margins(0.12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=TICK_DIGITS))
        low, high = axis.get_view_interval()
        if sum(low <= tick <= high for tick in axis.get_majorticklocs()) < MIN_TICKS:  # a range such as 41 to 49
            axis.set_major_locator(ticker.MaxNLocator(5))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter("{x:,g}")
    axes.set_title(f"{title}\norange: no other strategy needs less time and less memory", fontsize=9)
    axes.grid(alpha=0.3)
    for number, label in enumerate(points, 1):
        height = list_inches - LABEL_LINE_INCHES * (number - 0.2)
        color = BEST_COLOR if label in best else "black"
        place: dict[str, Any] = {"transform": figure.dpi_scale_trans, "va": "top", "fontsize": FONT_POINTS}
        figure.text(0.45, height, str(number), ha="right", color=color, **place)
        figure.text(0.55, height, label, color=color, **place)
    annotate_numbers(axes, list(points.values()))
    # Text instead of outlines of its letters keeps the file small.
    with rc_context({"svg.fonttype": "none"}):
        save_figure(axes, path)


def select_smallest(points: Mapping[str, Point]) -> list[str]:
    """Return the labels of the points for which no other point is at most as large in both directions."""
    smallest = []
    for label, point in points.items():
        others = [other for other in points.values() if other != point]
        if not any(other[0] <= point[0] and other[1] <= point[1] for other in others):
            smallest.append(label)
    return smallest


def annotate_numbers(axes: Any, points: Sequence[Point]) -> None:
    """Write the number of each point next to the point, with a thin line if the number is not adjacent."""
    axes.figure.canvas.draw()  # computes the layout
    scale = 72 / axes.figure.dpi
    centers = [(scale * x, scale * y) for x, y in axes.transData.transform(points)]
    frame = axes.get_window_extent()
    limits = Box(scale * frame.x0, scale * frame.y0, scale * frame.x1, scale * frame.y1)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0}
    for number, offset in enumerate(place_numbers(centers, limits), 1):
        is_adjacent = math.hypot(*offset) < DISTANCES[1] - 1
        line = None if is_adjacent else {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0}
        axes.annotate(
            str(number), points[number - 1], offset, textcoords="offset points", ha="center", va="center",
            fontsize=FONT_POINTS, arrowprops=line, bbox=background,
        )  # fmt: skip


def place_numbers(centers: Sequence[Point], limits: Box) -> list[Point]:
    """Return the offset of each number from its point, so that no number covers a point or another number.

    All values are in points. If no free position is left, the last candidate is used.
    """
    occupied = [make_box(center, MARKER_POINTS + 1, MARKER_POINTS + 1) for center in centers]
    offsets = []
    for number, (x, y) in enumerate(centers, 1):
        width = 0.62 * FONT_POINTS * len(str(number)) + 1
        for distance, angle in itertools.product(DISTANCES, ANGLES):
            offset = (distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle)))
            box = make_box((x + offset[0], y + offset[1]), width, FONT_POINTS)
            is_inside = box.left > limits.left and box.right < limits.right
            is_inside = is_inside and box.bottom > limits.bottom and box.top < limits.top
            if is_inside and not any(box.overlaps(other) for other in occupied):
                break
        occupied.append(box)
        offsets.append(offset)
    return offsets
