"""Figure of labeled points: numbers cover neither points nor other numbers."""

from __future__ import annotations

import math
import random
from pathlib import Path

from common.measure import labeled_points
from common.measure.labeled_points import FONT_POINTS, MARKER_POINTS, Box, make_box, place_numbers, select_smallest

FRAME = Box(0, 0, 350, 220)


def test_numbers_of_close_points_overlap_nothing() -> None:
    """Twenty points lie in four groups, in which all points touch each other."""
    draw = random.Random(0)
    centers = []
    for x, y in [(60.0, 60.0), (60.0, 150.0), (200.0, 60.0), (340.0, 210.0)] * 5:
        centers.append((x - 5 * draw.random(), y - 5 * draw.random()))
    markers = [make_box(center, MARKER_POINTS, MARKER_POINTS) for center in centers]
    boxes: list[Box] = []
    for number, offset in enumerate(place_numbers(centers, FRAME), 1):
        x, y = centers[number - 1]
        width = 0.6 * FONT_POINTS * len(str(number))
        box = make_box((x + offset[0], y + offset[1]), width, FONT_POINTS)
        assert not any(box.overlaps(other) for other in (*boxes, *markers))
        assert box.left > 0
        assert box.bottom > 0
        assert box.right < FRAME.right
        assert box.top < FRAME.top
        boxes.append(box)


def test_a_number_without_neighbors_is_next_to_its_point() -> None:
    (offset,) = place_numbers([(100.0, 100.0)], FRAME)
    assert math.hypot(*offset) < 10


def test_a_point_is_best_if_no_other_is_at_most_as_large_in_both_directions() -> None:
    points = {"fast": (4.0, 1.0), "small": (1.0, 4.0), "between": (2.0, 2.0)}
    points |= {"worse": (2.0, 3.0), "twin": (4.0, 1.0)}
    assert select_smallest(points) == ["fast", "small", "between", "twin"]


def test_the_figure_lists_every_label(tmp_path: Path) -> None:
    points = {}
    for number in range(6):
        points[f"tensor={number} sequence=true"] = (10.0 + number, 20.0 - number)
    file = tmp_path / "points.svg"
    labeled_points.draw_labeled_points(file, points, "memory, MB", "ms per step", title="four ranks")
    text = file.read_text()
    assert all(f">{label}</text>" in text for label in points)
    assert "four ranks" in text
