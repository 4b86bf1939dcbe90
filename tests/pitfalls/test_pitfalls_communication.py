"""Mistakes in communication between ranks: what they do, and what is correct."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.harness.pitfalls.communication_pitfalls import NUMBERS, RANKS, SECONDS, TRIES
from tests.harness.pitfalls.ddp_pitfalls import made

TOTAL = float(sum(range(1, RANKS + 1)))
EXACT = 1e-12


@pytest.fixture(scope="module")
def mistakes() -> list[dict[str, Any]]:
    """The observations of each rank, by case, from one launch."""
    return list(made("every", module="communication_pitfalls")["every"])


def collect(mistakes: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """Return the observations of each rank in one case."""
    return [rank[case] for rank in mistakes]


def test_an_all_gather_of_ones_own_by_that_name_calls_itself(mistakes: list[dict[str, Any]]) -> None:
    for observed in collect(mistakes, "shadowed_all_gather"):
        assert "maximum recursion depth exceeded" in observed["as written"]["error"], "no message was sent"
        assert "missing 1 required positional argument: 'tensor'" in observed["torch's"]["error"]
        assert "Expected parameter `tensor_list` of type List[torch.Tensor]" in observed["with the tensor"]["error"]
        assert observed["one tensor"] == [RANKS - 1.0] * RANKS, "each message overwrites the previous one"
        assert observed["right"] == [float(rank) for rank in range(RANKS)]


def test_the_ring_of_the_old_tutorial_sends_zeros_round(mistakes: list[dict[str, Any]]) -> None:
    for rank, observed in enumerate(collect(mistakes, "rings")):
        assert observed["old"]["came"] == [0.0] * (RANKS - 1)
        assert observed["old"]["sum"] == [2.0 * (rank + 1)], "the rank adds its own value repeatedly"
        assert observed["right"]["sum"] == [TOTAL]


def test_a_ring_of_whole_tensors_sends_twice_the_bytes(mistakes: list[dict[str, Any]]) -> None:
    for observed in collect(mistakes, "rings"):
        assert observed["whole"]["sum"] == [TOTAL]
        assert observed["right"]["sum"] == [TOTAL]
        assert observed["whole"]["bytes"] == pytest.approx(RANKS - 1, rel=0.01)
        assert observed["right"]["bytes"] == pytest.approx(2 * (RANKS - 1) / RANKS, rel=0.01)


def test_ranks_that_all_send_first_wait_for_each_other(mistakes: list[dict[str, Any]]) -> None:
    ranks = collect(mistakes, "blocking_sends")
    for rank, observed in enumerate(ranks):
        assert "error" in observed["mistake"], "with gloo, even the send of one number blocks"
        previous_rank = (rank - 1) % RANKS
        assert observed["right"] == [[previous_rank]] * 2
    assert max(observed["mistake"]["seconds"] for observed in ranks) >= SECONDS
    for observed in collect(mistakes, "blocking_sockets"):
        assert observed["few"] == 4, "small messages fit into the buffers"
        assert observed["many"]["error"] == "timed out"
        assert observed["many"]["seconds"] >= SECONDS
        assert observed["right"] == 4 * NUMBERS


def test_an_output_that_overlaps_its_input_loses_what_is_sent(mistakes: list[dict[str, Any]]) -> None:
    gathered = [float(rank + 1) for rank in range(RANKS)]
    ranks = collect(mistakes, "overlapping_outputs")
    for observed in ranks:
        assert observed["slice"] == [0.0] * RANKS
        assert observed["apart"] == gathered
        assert observed["torch's"] == gathered
        assert observed["exchanged"] == 0
    wrong_calls = sum(observed["in place"] for observed in ranks)
    assert 0 < wrong_calls <= RANKS * TRIES, "some calls return wrong numbers, without an error"


def compute_distance(parameters: list[float], expected: list[float]) -> float:
    """Return the largest absolute difference."""
    return max(abs(a - b) for a, b in zip(parameters, expected, strict=True))


def test_a_barrier_synchronises_no_gradients(mistakes: list[dict[str, Any]]) -> None:
    ranks = collect(mistakes, "barrier_for_gradients")
    for observed in ranks:
        assert observed["barrier"] == observed["alone"], "a rank trains as if there were no other rank"
        assert compute_distance(observed["right"], observed["whole batch"]) < EXACT
    for first, second in itertools.combinations(ranks, 2):
        assert compute_distance(first["barrier"], second["barrier"]) > 0.01


def test_a_server_that_averages_means_divides_twice(mistakes: list[dict[str, Any]]) -> None:
    for observed in collect(mistakes, "server_that_averages"):
        # the same as with the learning rate divided by the number of workers
        assert compute_distance(observed["twice"], observed["a third"]) < EXACT
        assert compute_distance(observed["twice"], observed["alone"]) > 0.01
        assert compute_distance(observed["right"], observed["alone"]) < EXACT
