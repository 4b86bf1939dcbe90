"""Figure of labeled points: numbers cover neither points nor other numbers."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

from common.measure import labeled_points
from common.measure.labeled_points import FONT_POINTS, MARKER_POINTS, Box, make_box, place_numbers, select_smallest

FRAME = Box(0, 0, 350, 220)


def test_numbers_of_close_points_overlap_nothing() -> None:
    """Twenty points lie in four groups, in which all points touch each other."""
    draw = random.Random(0)
    groups = [(60.0, 60.0), (60.0, 150.0), (200.0, 60.0), (340.0, 210.0)]
    centers = [(x - 5 * draw.random(), y - 5 * draw.random()) for x, y in groups * 5]
    boxes = []
    for number, ((x, y), offset) in enumerate(zip(centers, place_numbers(centers, FRAME), strict=True), 1):
        boxes.append(make_box((x + offset[0], y + offset[1]), 0.6 * FONT_POINTS * len(str(number)), FONT_POINTS))
    markers = [make_box(center, MARKER_POINTS, MARKER_POINTS) for center in centers]
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
    assert not any(box.overlaps(marker) for box in boxes for marker in markers)
    assert all(box.left > 0 and box.right < FRAME.right and box.bottom > 0 and box.top < FRAME.top for box in boxes)


def test_a_number_without_neighbors_is_next_to_its_point() -> None:
    (offset,) = place_numbers([(100.0, 100.0)], FRAME)
    assert math.hypot(*offset) < 10


def test_a_point_is_best_if_no_other_is_at_most_as_large_in_both_directions() -> None:
    points = {"fast": (4.0, 1.0), "small": (1.0, 4.0), "between": (2.0, 2.0), "worse": (2.0, 3.0), "twin": (4.0, 1.0)}
    assert select_smallest(points) == ["fast", "small", "between", "twin"]


def test_the_figure_lists_every_label(tmp_path: Path) -> None:
    labels = [f"tensor={2**number} sequence=true" for number in range(6)]
    points = {label: (10.0 + number, 20.0 - number) for number, label in enumerate(labels)}
    file = tmp_path / "points.svg"
    labeled_points.draw_labeled_points(file, points, "memory, MB", "ms per step", title="four ranks")
    text = file.read_text()
    assert all(f"<!-- {label} -->" in text for label in labels)
    assert "four ranks" in text
