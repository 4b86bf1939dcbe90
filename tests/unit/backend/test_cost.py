"""Costs of all-reduce algorithms: fitted message times, predicted seconds, and the choice by vector size."""

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

ALPHA = 2e-4  # seconds per message
BETA = 1e-8  # seconds per byte: 100 MB/s
LINES = MessageTimeLines(MessageTimeLine(ALPHA, BETA), MessageTimeLine(1e-6, 2e-10))
NBYTES = 3e6


@pytest.mark.parametrize("size", [*range(1, 9), 16])
def test_predictions_match_the_closed_formulas(size: int) -> None:
    ring = 2 * (size - 1) * (ALPHA + BETA * NBYTES / size)
    halving = 2 * log2(size) * ALPHA + 2 * (size - 1) / size * BETA * NBYTES
    formulas = {
        "ring": ring,
        "halving_doubling": ring if size & (size - 1) else halving,
        "tree": 2 * ceil(log2(size)) * (ALPHA + BETA * NBYTES),
        "star": 2 * (size - 1) * (ALPHA + BETA * NBYTES),
        "sharded_star": ring,
        "two_level": ring,
    }
    for name in ALGORITHM_NAMES:
        seconds = predict_seconds(build_algorithm(name, size), LINES, NBYTES)
        assert seconds == pytest.approx(formulas[name], rel=1e-9), name


@pytest.mark.parametrize("host_count, ranks_per_host", [(1, 4), (2, 2), (2, 4), (4, 2), (3, 3)])
def test_messages_within_a_host_have_a_separate_line(host_count: int, ranks_per_host: int) -> None:
    """Two stars of slices run within a host. Between hosts, one ring per rank of a host shares the host's cable."""
    hosts = [rank // ranks_per_host for rank in range(host_count * ranks_per_host)]
    algorithm = build_algorithm("two_level", len(hosts), hosts)
    messages_within_host = 2 * (ranks_per_host - 1)
    slice_bytes = NBYTES / ranks_per_host
    seconds_between_hosts = 2 * (host_count - 1) * (ranks_per_host * ALPHA + BETA * NBYTES / host_count)

    assert LINES.within_host is not None
    seconds = messages_within_host * LINES.within_host.predict_seconds(slice_bytes) + seconds_between_hosts
    assert predict_seconds(algorithm, LINES, NBYTES, hosts) == pytest.approx(seconds, rel=1e-9)

    single_line = MessageTimeLines(LINES.between_hosts)
    seconds = messages_within_host * LINES.between_hosts.predict_seconds(slice_bytes) + seconds_between_hosts
    assert predict_seconds(algorithm, single_line, NBYTES, hosts) == pytest.approx(seconds, rel=1e-9)


def test_ranks_of_a_host_share_its_cable() -> None:
    hosts = ["a", "a", "b", "b"]
    star_seconds = predict_seconds(build_algorithm("sharded_star", 4), LINES, NBYTES, hosts)
    assert star_seconds > 2 * 2 * 2 * BETA * NBYTES / 4  # each host sends four quarters to the other one, twice
    assert predict_seconds(build_algorithm("two_level", 4, hosts), LINES, NBYTES, hosts) < 0.6 * star_seconds


@pytest.mark.parametrize("alpha, beta", [(1e-4, 1e-9), (0.0, 1e-8), (3e-5, 0.0)])
def test_an_exact_line_is_recovered(alpha: float, beta: float) -> None:
    line = fit_message_time_line([(n, alpha + beta * n) for n in (4, 4096, 262_144, 4_000_000, 25_000_000)])
    assert line.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert line.beta == pytest.approx(beta, rel=1e-6, abs=1e-16)


def test_a_fit_keeps_relative_errors_small_at_both_ends() -> None:
    """An absolute fit would correct the error of 10 % at the longest time, a hundred alphas, at the short ones."""
    line = MessageTimeLine(1e-4, 1e-8)
    measured = [(nbytes, line.predict_seconds(nbytes)) for nbytes in (4, 1000, 100_000)]
    measured.append((10_000_000, 1.1 * line.predict_seconds(1e7)))
    fitted_line = fit_message_time_line(measured)
    for nbytes, seconds in measured:
        assert abs(fitted_line.predict_seconds(nbytes) / seconds - 1) < 0.1


def test_neither_part_of_a_line_is_negative() -> None:
    rising = fit_message_time_line([(1, 1.0), (100, 200.0)])
    assert rising.alpha == 0
    assert rising.beta == pytest.approx(1.2)
    falling = fit_message_time_line([(1, 1.0), (100, 0.5)])
    assert falling.beta == 0
    assert falling.alpha == pytest.approx(0.6)  # (1/1 + 1/0.5) / (1/1 + 1/0.25)


@pytest.mark.parametrize("measured", [[], [(4, 1e-4)], [(4, 1e-4), (4, 2e-4)], [(4, 0.0), (8, 1e-4)]])
def test_too_few_times_are_refused(measured: list[tuple[float, float]]) -> None:
    with pytest.raises(UserError, match="fitting a line requires positive times for at least two sizes"):
        fit_message_time_line(measured)


def test_the_choice_follows_the_size() -> None:
    names = ("ring", "tree", "star")
    choice = choose_algorithms_by_size(LINES, names, 8)
    first_name, bound, last_name = choice.split("<")
    # The tree sends 6 messages in a row, the ring 14, each of an eighth of the vector.
    assert (first_name, last_name) == ("tree", "ring")
    tree = build_algorithm("tree", 8)
    ring = build_algorithm("ring", 8)
    small_nbytes = int(bound) / 4
    large_nbytes = int(bound)
    assert predict_seconds(tree, LINES, small_nbytes) <= predict_seconds(ring, LINES, small_nbytes)
    assert predict_seconds(ring, LINES, large_nbytes) <= predict_seconds(tree, LINES, large_nbytes)


def test_the_choice_follows_ranks_and_hosts() -> None:
    # On two ranks, all algorithms send two messages in a row; those of the ring have half the size.
    assert choose_algorithms_by_size(LINES, ("ring", "tree", "star"), 2) == "ring"
    assert choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 8) == "halving_doubling"
    assert choose_algorithms_by_size(LINES, ("halving_doubling", "tree"), 3) == "tree", "halving needs a power of two"
    assert choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 4, "aabb").endswith("<two_level")
    assert choose_algorithms_by_size(LINES, ["star"], 1) == "star"
    for size in range(2, 9):
        choice = choose_algorithms_by_size(LINES, ("sharded_star", "ring"), size)
        assert choice == "sharded_star", "the first of two equally fast algorithms"


def test_simulating_only_two_sizes_leads_to_the_same_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many ranks, all other ranks would wait for the simulations: a ring of p ranks has 4 p (p - 1) moves."""
    simulated_choice = choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 12, "aaabbbcccddd")
    monkeypatch.setattr(cost, "MAX_MOVES", 0)
    assert choose_algorithms_by_size(LINES, ALGORITHM_NAMES, 12, "aaabbbcccddd") == simulated_choice


def test_algorithms_with_too_many_moves_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MAX_MOVES", 0)
    monkeypatch.setattr(cost, "MAX_RANKS", 11)
    assert "ring" not in choose_algorithms_by_size(LINES, ("ring", "tree"), 12)
    assert choose_algorithms_by_size(LINES, ("two_level", "tree"), 12).endswith("tree")
    assert choose_algorithms_by_size(LINES, ("two_level", "tree"), 12, "aaaaaabbbbbb").endswith("two_level")
