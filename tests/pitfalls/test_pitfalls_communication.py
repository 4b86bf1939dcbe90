"""The mistakes about communication between ranks: what they really do, and what is right instead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.communication_pitfalls import NUMBERS, RANKS, SECONDS, TRIES
from tests.harness.ddp_pitfalls import made

TOTAL = float(sum(range(1, RANKS + 1)))
EXACT = 1e-12


@pytest.fixture(scope="module")
def mistakes() -> list[dict[str, Any]]:
    """What each rank found with each mistake and without, in one start."""
    return list(made("every", module="communication_pitfalls")["every"])


def collect(mistakes: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """What each rank found in one case."""
    return [rank[case] for rank in mistakes]


def test_an_all_gather_of_ones_own_by_that_name_calls_itself(mistakes: list[dict[str, Any]]) -> None:
    for found in collect(mistakes, "shadowed_all_gather"):
        assert "maximum recursion depth exceeded" in found["as written"]["error"], "no message was sent"
        assert "missing 1 required positional argument: 'tensor'" in found["torch's"]["error"]
        assert "Expected parameter `tensor_list` of type List[torch.Tensor]" in found["with the tensor"]["error"]
        assert found["one tensor"] == [RANKS - 1.0] * RANKS, "each message overwrites the one before"
        assert found["right"] == [float(rank) for rank in range(RANKS)]


def test_the_ring_of_the_old_tutorial_sends_zeros_round(mistakes: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(collect(mistakes, "rings")):
        assert found["old"]["came"] == [0.0] * (RANKS - 1)
        assert found["old"]["sum"] == [2.0 * (rank + 1)], "its own value, as often as it was added"
        assert found["right"]["sum"] == [TOTAL]


def test_a_ring_of_whole_tensors_sends_twice_the_bytes(mistakes: list[dict[str, Any]]) -> None:
    for found in collect(mistakes, "rings"):
        assert found["whole"]["sum"] == found["right"]["sum"] == [TOTAL]
        assert found["whole"]["bytes"] == pytest.approx(RANKS - 1, rel=0.01)
        assert found["right"]["bytes"] == pytest.approx(2 * (RANKS - 1) / RANKS, rel=0.01)


def test_ranks_that_all_send_first_wait_for_each_other(mistakes: list[dict[str, Any]]) -> None:
    found = collect(mistakes, "blocking_sends")
    assert all("error" in one["mistake"] for one in found), "with gloo even of one number"
    assert max(one["mistake"]["seconds"] for one in found) >= SECONDS
    for rank, one in enumerate(found):
        assert one["right"] == [[float((rank - 1) % RANKS)]] * 2
    for one in collect(mistakes, "blocking_sockets"):
        assert one["few"] == 4, "what the buffers hold goes well"
        assert one["many"]["error"] == "timed out" and one["many"]["seconds"] >= SECONDS
        assert one["right"] == 4 * NUMBERS


def test_an_output_that_overlaps_its_input_loses_what_is_sent(mistakes: list[dict[str, Any]]) -> None:
    everybodys = [float(rank + 1) for rank in range(RANKS)]
    found = collect(mistakes, "overlapping_outputs")
    for one in found:
        assert one["slice"] == [0.0] * RANKS and one["apart"] == one["torch's"] == everybodys
        assert one["exchanged"] == 0
    assert 0 < sum(one["in place"] for one in found) <= RANKS * TRIES, "now and then, and nothing tells"


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_a_barrier_synchronises_no_gradients(mistakes: list[dict[str, Any]]) -> None:
    found = collect(mistakes, "barrier_for_gradients")
    for one in found:
        assert one["barrier"] == one["alone"], "as if there were no other rank"
        assert apart(one["right"], one["whole batch"]) < EXACT
    for number, one in enumerate(found):
        assert all(apart(one["barrier"], other["barrier"]) > 0.01 for other in found[:number])


def test_a_server_that_averages_means_divides_twice(mistakes: list[dict[str, Any]]) -> None:
    for found in collect(mistakes, "server_that_averages"):
        assert apart(found["twice"], found["a third"]) < EXACT, "the learning rate divided by the number of workers"
        assert apart(found["twice"], found["alone"]) > 0.01
        assert apart(found["right"], found["alone"]) < EXACT
