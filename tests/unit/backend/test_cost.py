"""Costs of all-reduce algorithms: lines are found again, predictions are the closed formulas, the choice follows."""

from __future__ import annotations

from math import ceil, log2

import pytest

from common.backend import cost
from common.backend.algorithms import ALGORITHM_NAMES, build_algorithm
from common.backend.cost import (
    MessageTimeLine,
    MessageTimeLines,
    choose_algorithms_by_size,
    fit_message_time_line,
    predict_seconds,
)
from common.system.errors import UserError

ALPHA, BETA = 2e-4, 1e-8  # 100 MB/s
LINES = MessageTimeLines(MessageTimeLine(ALPHA, BETA), MessageTimeLine(1e-6, 2e-10))
N = 3e6


@pytest.mark.parametrize("p", [*range(1, 9), 16])
def test_predictions_are_the_closed_formulas(p: int) -> None:
    ring = 2 * (p - 1) * (ALPHA + BETA * N / p)
    halving = 2 * log2(p) * ALPHA + 2 * (p - 1) / p * BETA * N
    formulas = {
        "ring": ring,
        "halving_doubling": ring if p & (p - 1) else halving,
        "tree": 2 * ceil(log2(p)) * (ALPHA + BETA * N),
        "star": 2 * (p - 1) * (ALPHA + BETA * N),
        "sharded_star": ring,
        "two_level": ring,
    }
    for name in ALGORITHM_NAMES:
        assert predict_seconds(build_algorithm(name, p), LINES, N) == pytest.approx(formulas[name], rel=1e-9), name


@pytest.mark.parametrize(("hosts", "each"), [(1, 4), (2, 2), (2, 4), (4, 2), (3, 3)])
def test_links_inside_a_host_have_their_own_line(hosts: int, each: int) -> None:
    """Inside: two stars of slices; between: as many rings as a host has ranks take turns at its one cable."""
    host_of = [rank // each for rank in range(hosts * each)]
    algorithm = build_algorithm("two_level", hosts * each, host_of)
    inside = 2 * (each - 1) * LINES.within_host.predict_seconds(N / each) if LINES.within_host else 0
    between = 2 * (hosts - 1) * (each * ALPHA + BETA * N / hosts)
    assert predict_seconds(algorithm, LINES, N, host_of) == pytest.approx(inside + between, rel=1e-9)
    slower = predict_seconds(
        algorithm, MessageTimeLines(LINES.between_hosts), N, host_of
    )  # without a line of their own
    assert slower == pytest.approx(2 * (each - 1) * LINES.between_hosts.predict_seconds(N / each) + between, rel=1e-9)


def test_ranks_of_a_host_share_its_cable() -> None:
    host_of = ["a", "a", "b", "b"]
    star = predict_seconds(build_algorithm("sharded_star", 4), LINES, N, host_of)
    assert star > 2 * 2 * 2 * BETA * N / 4  # each host sends four quarters to the other one, twice
    assert predict_seconds(build_algorithm("two_level", 4, host_of), LINES, N, host_of) < 0.6 * star


@pytest.mark.parametrize(("alpha", "beta"), [(1e-4, 1e-9), (0.0, 1e-8), (3e-5, 0.0)])
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    line = fit_message_time_line([(n, alpha + beta * n) for n in (4, 4096, 262_144, 4_000_000, 25_000_000)])
    assert line.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert line.beta == pytest.approx(beta, rel=1e-6, abs=1e-16)


def test_a_fit_keeps_relative_errors_small_at_both_ends() -> None:
    """Ten per cent at the longest time are a hundred alphas, and would be paid by the short ones."""
    measured = [*((n, 1e-4 + 1e-8 * n) for n in (4, 1000, 100_000)), (1e7, 1.1 * (1e-4 + 0.1))]
    line = fit_message_time_line(measured)
    assert max(abs(line.predict_seconds(n) / t - 1) for n, t in measured) < 0.1


def test_neither_part_of_a_line_is_negative() -> None:
    rising = fit_message_time_line([(1, 1.0), (100, 200.0)])
    assert rising.alpha == 0 and rising.beta == pytest.approx(1.2)
    falling = fit_message_time_line([(1, 1.0), (100, 0.5)])
    assert falling.beta == 0 and falling.alpha == pytest.approx(0.6)  # (1/1 + 1/0.5) / (1/1 + 1/0.25)


@pytest.mark.parametrize("measured", [[], [(4, 1e-4)], [(4, 1e-4), (4, 2e-4)], [(4, 0.0), (8, 1e-4)]])
def test_too_few_times_are_refused(measured: list[tuple[float, float]]) -> None:
    with pytest.raises(UserError, match="fitting a line requires positive times for at least two sizes"):
        fit_message_time_line(measured)


def test_the_choice_follows_the_size() -> None:
    names = ("ring", "tree", "star")
    choice = choose_algorithms_by_size(LINES, names, 8)
    first, bound, last = choice.split("<")
    assert (first, last) == ("tree", "ring")  # 6 messages in a row instead of 14; but the ring's are an eighth
    tree, ring = (build_algorithm(name, 8) for name in (first, last))
    for nbytes, least in ((int(bound) / 4, tree), (int(bound), ring)):
        assert predict_seconds(least, LINES, nbytes) == min(predict_seconds(one, LINES, nbytes) for one in (tree, ring))
    assert choose_algorithms_by_size(LINES, names, 2) == "ring"  # all take two messages in a row, the ring's are half
    assert choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 8) == "halving_doubling"
    assert choose_algorithms_by_size(LINES, ("halving_doubling", "tree"), 3) == "tree", "three ranks cannot halve"
    assert choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 4, "aabb").endswith("<two_level")
    assert choose_algorithms_by_size(LINES, ["star"], 1) == "star"
    for size in range(2, 9):
        assert choose_algorithms_by_size(LINES, ("sharded_star", "ring"), size) == "sharded_star"  # equal: the first


def test_with_many_ranks_less_is_simulated_and_the_choice_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses while the others wait; a ring of p ranks has 4 p (p - 1) moves."""
    simulated = choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 12, "aaabbbcccddd")
    monkeypatch.setattr(cost, "MAX_MOVES", 0)
    assert choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 12, "aaabbbcccddd") == simulated, (
        "two sizes and a line say the same"
    )
    monkeypatch.setattr(cost, "MAX_RANKS", 11)
    assert "ring" not in choose_algorithms_by_size(LINES, ("ring", "tree"), 12)
    assert choose_algorithms_by_size(LINES, ("two_level", "tree"), 12).endswith("tree")
    assert choose_algorithms_by_size(LINES, ("two_level", "tree"), 12, "aaaaaabbbbbb").endswith("two_level")
