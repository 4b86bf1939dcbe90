"""The curves of many runs can be distinguished."""

from __future__ import annotations

from common.runs.compare.curve_styles import choose_curve_style


def test_many_runs_have_different_styles() -> None:
    styles = [choose_curve_style(number) for number in range(250)]
    assert len(set(styles)) == 250
    assert {(style.dash, style.marker) for style in styles[:10]} == {("", "")}


def test_fifty_runs_of_the_same_color_differ_in_dash_and_marker() -> None:
    styles = [choose_curve_style(number) for number in range(50)]
    for colour in {style.colour for style in styles}:
        same_colour = [style for style in styles if style.colour == colour]
        assert len({style.dash for style in same_colour}) == 5
        assert len({style.marker for style in same_colour}) == 5
