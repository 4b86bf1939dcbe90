"""Colors, dash patterns and markers that distinguish the curves of many runs. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = (
    *("#2a78d6", "#e07b1a", "#2f9e44", "#d6336c", "#7b56c4"),
    *("#8a6d3b", "#c2a000", "#0f9aa8", "#c92a2a", "#6b7684"),
)  # for light pages; the style sheet lightens these colors on dark pages
DASHES = ("", "7 3", "2 3", "12 3 2 3", "16 5")
"""Dash patterns in the format of the SVG attribute stroke-dasharray."""
MARKERS = (
    "",
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0Z",  # circle
    "M-3 -3H3V3H-3Z",  # square
    "M0 -4L4 3H-4Z",  # triangle
    "M0 -4.6L4.6 0L0 4.6L-4.6 0Z",  # diamond
)
"""SVG paths around the origin."""


@dataclass(frozen=True)
class CurveStyle:
    """Appearance of all curves of one run."""

    colour: str
    dash: str
    marker: str
    """SVG path of the marker, or an empty string."""


def choose_curve_style(number: int) -> CurveStyle:
    """Return the style of the run with this number, counted from 0. The first 250 styles differ.

    The first ten runs differ in color only. Further runs with the same color differ in dash pattern and marker.
    """
    repetition, hue = divmod(number, len(COLOURS))
    shift, dash = divmod(repetition, len(DASHES))
    return CurveStyle(COLOURS[hue], DASHES[dash], MARKERS[(dash + shift) % len(MARKERS)])
