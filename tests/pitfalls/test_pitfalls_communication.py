"""Mistakes in communication between ranks: what they do, and what is correct."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.harness.pitfalls.communication_pitfalls import BLOCKED_TIMEOUT, ELEMENTS, EXCHANGES, RANKS
from tests.harness.pitfalls.outcomes import collect_outcome

TOTAL = float(sum(range(1, RANKS + 1)))
TOLERANCE = 1e-12


Outcomes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """The outcomes of each rank by case, from one launch."""
    ranks = collect_outcome("communication_pitfalls", "execute_all")
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def test_a_function_that_shadows_all_gather_calls_itself(outcomes: Outcomes) -> None:
    for outcome in outcomes["shadowed_all_gather"]:
        assert "maximum recursion depth exceeded" in outcome["shadowed"]["error"], "no message was sent"
        assert "missing 1 required positional argument: 'tensor'" in outcome["without input"]["error"]
        assert "Expected parameter `tensor_list` of type List[torch.Tensor]" in outcome["None as output"]["error"]
        assert outcome["one output repeated"] == [RANKS - 1.0] * RANKS, "each message overwrites the previous one"
        assert outcome["correct"] == [float(rank) for rank in range(RANKS)]


def test_the_ring_of_the_old_tutorial_sends_only_zeros(outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes["ring_all_reduces"]):
        assert outcome["received maxima of old tutorial"] == [0.0] * (RANKS - 1)
        assert outcome["old tutorial"]["sum"] == [2.0 * (rank + 1)], "the rank adds its own value repeatedly"
        assert outcome["correct"]["sum"] == [TOTAL]


def test_a_ring_that_sends_full_tensors_sends_twice_the_bytes(outcomes: Outcomes) -> None:
    for outcome in outcomes["ring_all_reduces"]:
        assert outcome["new tutorial"]["sum"] == [TOTAL]
        assert outcome["correct"]["sum"] == [TOTAL]
        assert outcome["new tutorial"]["relative_bytes"] == pytest.approx(RANKS - 1, rel=0.01)
        assert outcome["correct"]["relative_bytes"] == pytest.approx(2 * (RANKS - 1) / RANKS, rel=0.01)


def test_ranks_that_all_send_before_they_receive_wait_for_each_other(outcomes: Outcomes) -> None:
    ranks = outcomes["blocking_sends"]
    for rank, outcome in enumerate(ranks):
        assert "error" in outcome["mistake"], "with gloo, even the send of one number blocks"
        previous_rank = (rank - 1) % RANKS
        assert outcome["correct"] == [[previous_rank]] * 2
    assert max(outcome["mistake"]["seconds"] for outcome in ranks) >= BLOCKED_TIMEOUT
    for outcome in outcomes["blocking_sockets"]:
        assert outcome["small message"] == 4, "small messages fit into the buffers"
        assert outcome["mistake"]["error"] == "timed out"
        assert outcome["mistake"]["seconds"] >= BLOCKED_TIMEOUT
        assert outcome["correct"] == 4 * ELEMENTS


def test_an_output_that_overlaps_its_input_is_wrong(outcomes: Outcomes) -> None:
    gathered = [float(rank + 1) for rank in range(RANKS)]
    ranks = outcomes["output_overlaps_input"]
    for outcome in ranks:
        assert outcome["sum of slices"] == [0.0] * RANKS
        assert outcome["sum of separate inputs"] == gathered
        assert outcome["torch with slices"] == gathered
        assert outcome["wrong exchanges"] == 0
    wrong_exchanges = sum(outcome["wrong exchanges in place"] for outcome in ranks)
    assert 0 < wrong_exchanges <= RANKS * EXCHANGES, "some calls return wrong numbers, without an error"


def compute_distance(parameters: list[float], expected: list[float]) -> float:
    """Return the largest absolute difference."""
    return max(abs(a - b) for a, b in zip(parameters, expected, strict=True))


def test_a_barrier_does_not_synchronize_gradients(outcomes: Outcomes) -> None:
    ranks = outcomes["barrier_instead_of_all_reduce"]
    for outcome in ranks:
        assert outcome["barrier"] == outcome["no synchronization"], "a rank trains as if there were no other rank"
        assert compute_distance(outcome["correct"], outcome["full batch"]) < TOLERANCE
    for first, second in itertools.combinations(ranks, 2):
        assert compute_distance(first["barrier"], second["barrier"]) > 0.01


def test_gradients_that_are_averaged_twice_are_too_small(outcomes: Outcomes) -> None:
    for outcome in outcomes["gradients_averaged_twice"]:
        # the same as with the learning rate divided by the number of workers
        assert compute_distance(outcome["mistake"], outcome["reduced learning rate"]) < TOLERANCE
        assert compute_distance(outcome["mistake"], outcome["one process"]) > 0.01
        assert compute_distance(outcome["correct"], outcome["one process"]) < TOLERANCE
