"""All-reduce algorithms: sums, bytes and drawings of the built-in ones, and refusal of invalid custom ones."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest

from common.backend import algorithms
from common.backend.algorithms import (
    ALGORITHM_NAMES,
    build_algorithm,
    build_algorithms_by_size,
    check_algorithm,
    count_bytes_per_rank,
)
from common.backend.algorithms.moves import Algorithm, Move, compute_chunk_bounds
from common.system.errors import UserError
from tests.harness.commands import execution
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import make_environment

SIZES = (*range(1, 9), 16)


def execute_moves(algorithm: Algorithm, vectors: list[list[int]]) -> None:
    """Execute the moves on lists of numbers, one move of each rank in turn."""
    messages: defaultdict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
    queues = [deque(moves) for moves in algorithm.moves]
    while any(queues):
        is_deadlocked = True
        for rank, queue in enumerate(queues):
            if queue and execute_move(algorithm, rank, queue[0], vectors[rank], messages):
                queue.popleft()
                is_deadlocked = False
        assert not is_deadlocked


def execute_move(
    algorithm: Algorithm,
    rank: int,
    move: Move,
    vector: list[int],
    messages: defaultdict[tuple[int, int], deque[list[int]]],
) -> bool:
    """Execute a move on the vector of its rank; return False if its message has not been sent yet."""
    start, end = compute_chunk_bounds(len(vector), algorithm.chunks, move.chunk, move.chunks)
    if move.kind == "send":
        messages[rank, move.peer].append(vector[start:end])
        return True
    inbox = messages[move.peer, rank]
    if not inbox:
        return False
    numbers = inbox.popleft()
    assert len(numbers) == end - start
    if move.kind == "add":
        numbers = [left + right for left, right in zip(vector[start:end], numbers, strict=True)]
    vector[start:end] = numbers
    return True


def list_multiples(factor: int, count: int) -> list[int]:
    return [factor * number for number in range(1, count + 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_every_rank_ends_with_the_sum(name: str, size: int) -> None:
    max_ranks_per_host = size if name == "two_level" else 1  # other algorithms ignore the hosts
    for ranks_per_host in range(1, max_ranks_per_host + 1):  # the last host may have fewer ranks
        hosts = [rank // ranks_per_host for rank in range(size)]
        algorithm = build_algorithm(name, size, hosts)
        check_algorithm(algorithm)
        for length in {0, 1, size - 1, size, 2 * size + 1}:
            vectors = [list_multiples(10**rank, length) for rank in range(size)]
            execute_moves(algorithm, vectors)
            total = list_multiples(int("1" * size), length)
            assert vectors == [total] * size


@pytest.mark.parametrize("size", SIZES)
def test_bytes_match_the_formulas(size: int) -> None:
    nbytes = 840 * size
    minimum = [2 * (size - 1) * nbytes // size] * size
    for name in ("ring", "halving_doubling", "sharded_star", "two_level"):
        algorithm = build_algorithm(name, size)
        assert count_bytes_per_rank(algorithm, nbytes) == minimum, name
        assert count_bytes_per_rank(algorithm, nbytes, received=True) == minimum, name

    star = build_algorithm("star", size)
    star_bytes = [(size - 1) * nbytes, *[nbytes] * (size - 1)]
    assert count_bytes_per_rank(star, nbytes) == star_bytes
    assert count_bytes_per_rank(star, nbytes, received=True) == star_bytes

    tree_bytes = count_bytes_per_rank(build_algorithm("tree", size), nbytes)
    assert sum(tree_bytes) == 2 * (size - 1) * nbytes
    assert tree_bytes[0] == ceil(log2(size)) * nbytes


@pytest.mark.parametrize("host_count, ranks_per_host", [(1, 4), (2, 2), (4, 2), (3, 3), (2, 8)])
def test_two_level_sends_as_little_between_hosts_as_a_ring_of_hosts(host_count: int, ranks_per_host: int) -> None:
    size = host_count * ranks_per_host
    hosts = [rank % host_count for rank in range(size)]  # neighboring ranks are on different hosts
    algorithm = build_algorithm("two_level", size, hosts)
    nbytes = 840 * algorithm.chunks
    bytes_between_hosts = [0] * host_count
    for rank, moves in enumerate(algorithm.moves):
        for kind, _, peer, chunks in moves:
            if kind == "send" and hosts[peer] != hosts[rank]:
                bytes_between_hosts[hosts[rank]] += nbytes * chunks // algorithm.chunks
    ring_bytes = 2 * (host_count - 1) * nbytes / host_count
    assert bytes_between_hosts == [ring_bytes] * host_count

    rank_bytes_within_host = 2 * (ranks_per_host - 1) / ranks_per_host * nbytes
    rank_bytes = rank_bytes_within_host + ring_bytes / ranks_per_host
    assert count_bytes_per_rank(algorithm, nbytes) == [rank_bytes] * size


def test_chunks_are_nearly_equal_and_cover_the_vector() -> None:
    for length in range(20):
        for chunks in range(1, 9):
            positions: list[int] = []
            sizes = []
            for chunk in range(chunks):
                start, end = compute_chunk_bounds(length, chunks, chunk)
                positions += range(start, end)
                sizes.append(end - start)
            assert positions == list(range(length))
            assert max(sizes) - min(sizes) <= 1
            assert compute_chunk_bounds(length, chunks, 0, chunks) == (0, length)


def test_a_ring_replaces_halving_doubling_on_three_ranks() -> None:
    algorithm = build_algorithm("halving_doubling", 3)
    assert replace(algorithm, note="") == build_algorithm("ring", 3)
    note = "halving_doubling requires the number of ranks to be a power of two (got 3); using ring instead"
    assert algorithm.note == note
    assert not build_algorithm("halving_doubling", 4).note


def list_mistakes(rank: int, move: Move) -> list[list[Move]]:
    """Return wrong replacements of a move."""
    mistakes = [[], [move, move], [move._replace(chunk=move.chunk + 1)], [move._replace(peer=rank)]]
    if move.kind == "add":
        mistakes.append([move._replace(kind="receive")])
    if move.kind == "receive":
        mistakes.append([move._replace(kind="add")])
    return mistakes


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_each_single_changed_move_is_refused(name: str) -> None:
    algorithm = build_algorithm(name, 4, "aabb")
    for rank, moves in enumerate(algorithm.moves):
        for position, move in enumerate(moves):
            for mistake in list_mistakes(rank, move):
                changed_moves = (*moves[:position], *mistake, *moves[position + 1 :])
                all_moves = (*algorithm.moves[:rank], changed_moves, *algorithm.moves[rank + 1 :])
                with pytest.raises(UserError, match=r"rank \d.* move"):
                    check_algorithm(replace(algorithm, moves=all_moves))


def build_custom_algorithm(folder: Path, plan: object, size: int) -> Algorithm:
    """Build the algorithm of a custom function that returns `plan`."""
    file = folder / "custom.py"
    file.write_text(f"def all_reduce(ranks):\n    return {plan!r}\n")
    return build_algorithm(f"{file}:all_reduce", size)


def test_a_custom_algorithm_is_loaded(tmp_path: Path) -> None:
    """Recursive doubling: ranks exchange their full vectors in pairs, then with the other pair."""
    plan = []
    for rank in range(4):
        neighbor = rank ^ 1
        opposite = rank ^ 2
        plan.append([("send", 0, neighbor), ("add", 0, neighbor), ("send", 0, opposite), ("add", 0, opposite)])
    algorithm = build_custom_algorithm(tmp_path, plan, 4)
    assert algorithm.chunks == 1
    assert algorithm.moves[3][2] == Move("send", 0, 1)
    assert count_bytes_per_rank(algorithm, 100) == [200] * 4
    assert build_custom_algorithm(tmp_path, [[]], 1).moves == ((),)


def build_ring_of_full_vectors(kind: str) -> list[list[tuple[str, int, int]]]:
    """Return the moves of three ranks that pass their full vectors around twice."""
    return [2 * [("send", 0, (rank + 1) % 3), (kind, 0, (rank - 1) % 3)] for rank in range(3)]


def exchange_with(first_peer: int, second_peer: int) -> str:
    """Return the moves of a rank that adds the vector of each peer, in this order."""
    return f"send 0 {first_peer}, send 0 {second_peer}, add 0 {first_peer}, add 0 {second_peer}"


def read_moves(text: str) -> list[tuple[Any, ...]]:
    """Read the moves of a rank, each `kind chunk peer`, or `kind chunk peer count`."""
    moves = [move.split() for move in text.split(",") if move]
    return [(kind, *map(int, numbers)) for kind, *numbers in moves]


INVALID_PLANS: dict[str, tuple[Any, str]] = {
    "both ranks wait first": (
        ["add 0 1, send 0 1", "add 0 0, send 0 0"],
        "deadlock: rank 0, move 0 (add chunk 0 from rank 1) waits for the message that rank 1 sends in move 1, but "
        "rank 1, move 0 (add chunk 0 from rank 0) comes first and is also waiting (cycle: rank 0 -> rank 1 -> rank 0)",
    ),
    "two of three ranks wait for each other": (
        ["add 0 1", "add 0 2, send 0 0, send 0 2", "add 0 1, send 0 1"],
        "deadlock: rank 1, move 0 (add chunk 0 from rank 2) waits for the message that rank 2 sends in move 1, but "
        "rank 2, move 0 (add chunk 0 from rank 1) comes first and is also waiting (cycle: rank 1 -> rank 2 -> rank 1)",
    ),
    # the ring of PyTorch's first tutorial received each message and added none (pytorch#31572)
    "ring of PyTorch's first tutorial": (
        build_ring_of_full_vectors("receive"),
        "rank 0 ends without the values of rank 0, rank 2 in chunk 0; move 3 of rank 0 (receive chunk 0 from rank 2) "
        "is the last to write this chunk",
    ),
    "full sums around the ring": (
        build_ring_of_full_vectors("add"),
        "rank 2, move 3 (add chunk 0 from rank 1) counts the values of rank 1 twice",
    ),
    "a chunk without add": (
        ["send 0 1, send 2 1, receive 0 1", "add 0 0, receive 2 0, send 0 0"],
        "rank 0 ends without the values of rank 1 in chunk 1; no move of rank 0 writes this chunk",
    ),
    "wrong chunk": (
        ["send 0 1, send 1 1", "add 1 0, add 0 0"],
        "rank 1, move 0 (add chunk 1 from rank 0) receives the wrong chunk: the next message was sent by rank "
        "0, move 0 (send chunk 0 to rank 1)",
    ),
    "fewer chunks received than sent": (
        ["send 0 1 2", "add 0 0"],
        "rank 1, move 0 (add chunk 0 from rank 0) receives the wrong chunk: the next message was sent by rank "
        "0, move 0 (send chunks 0-1 to rank 1)",
    ),
    "message to the same rank": (
        ["send 0 0", ""],
        "rank 0, move 0 (send chunk 0 to rank 0): a rank cannot exchange a message with itself",
    ),
    "unknown peer": (["", "send 0 2"], "rank 1, move 0 (send chunk 0 to rank 2): rank 2 does not exist; the"),
    "missing send": (
        ["send 0 1", "add 0 0, send 0 0, add 0 0"],
        "rank 1, move 2 (add chunk 0 from rank 0) waits forever, because rank 0 sends no further message to rank 1",
    ),
    "missing receive": (
        ["send 0 1, receive 0 1", "add 0 0, send 0 0, send 0 0"],
        "rank 0 never receives the message of rank 1, move 2 (send chunk 0 to rank 0)",
    ),
    "different orders of addition": (
        [exchange_with(1, 2), exchange_with(0, 2), exchange_with(0, 1)],
        "rank 2 adds up chunk 0 in a different order than rank 0, so the two sums would round differently; add up the "
        "chunk on one rank and send the sum to all others (move 3 of rank 2 (add chunk 0 from rank 1) is the last",
    ),
    "unknown kind": (
        ["give 0 1", ""],
        "rank 0, move 0 (give chunk 0 from rank 1): the kind of a move must be send, receive or add",
    ),
    "negative chunk": (["send -1 1", ""], "rank 0, move 0 (send chunk -1 to rank 1): the move uses"),
    "zero chunks": (["send 0 1 0", ""], "the move uses a chunk that does not exist"),
    "too many chunks": ([[("send", 0, 1, 10**12)], []], "a chunk that does not exist; the chunks are 0-65535"),
    "missing rank": ([[]], "the function must return one list of moves per rank (got 1 list for 2 ranks)"),
    "fractional chunk": ([[("send", 0.5, 1)], []], f"interpreted as an integer; {algorithms.USAGE}"),
    "missing peer": (["send 0", ""], f"'peer'; {algorithms.USAGE}"),
    "no plan": (None, f"'NoneType' object is not iterable; {algorithms.USAGE}"),
}


@pytest.mark.parametrize("plan, expected", INVALID_PLANS.values(), ids=INVALID_PLANS)
def test_invalid_plans_are_refused_naming_rank_and_move(tmp_path: Path, plan: Any, expected: str) -> None:
    size = max(2, len(plan or []))
    if plan:
        plan = [read_moves(moves) if isinstance(moves, str) else moves for moves in plan]
    with pytest.raises(UserError) as caught:
        build_custom_algorithm(tmp_path, plan, size)
    message = str(caught.value)
    file = tmp_path / "custom.py"
    assert message.startswith(f"launch.algorithm={file}:all_reduce: {file}:1: ")
    assert expected in message
    assert "\n" not in message


def test_an_unknown_name_is_refused_with_the_available_names() -> None:
    message = r"launch\.algorithm=rng: expected FILE\.py:function or one of ring, halving_doubling, tree, star"
    with pytest.raises(UserError, match=message):
        build_algorithm("rng", 4)


def test_algorithms_by_size_are_read() -> None:
    tree = build_algorithm("tree", 4)
    ring = build_algorithm("ring", 4)
    assert build_algorithms_by_size("tree<65536<ring", 4) == [(0, tree), (65536, ring)]
    assert build_algorithms_by_size("star", 3) == [(0, build_algorithm("star", 3))]


@pytest.mark.parametrize(
    "names", ["tree<ring", "tree<64", "tree<9<ring<9<star", "tree<0<ring", "tree<x<ring", "tree<4<oak", "<4<ring"]
)
def test_invalid_algorithms_by_size_are_refused(names: str) -> None:
    with pytest.raises(UserError, match=f"launch.algorithm={names}: .* as in tree<65536<ring; available: ring, "):
        build_algorithms_by_size(names, 4)


RING = """\
ring: 4 ranks, 4 chunks, 6 steps
c0 +> r1: rank 1 receives chunk 0 and adds it; c0 => r1: rank 1 stores it; n: size of the vector in bytes

         rank 0     rank 1     rank 2     rank 3
step 1   c0 +> r1   c1 +> r2   c2 +> r3   c3 +> r0
step 2   c3 +> r1   c0 +> r2   c1 +> r3   c2 +> r0
step 3   c2 +> r1   c3 +> r2   c0 +> r3   c1 +> r0
step 4   c1 => r1   c2 => r2   c3 => r3   c0 => r0
step 5   c0 => r1   c1 => r2   c2 => r3   c3 => r0
step 6   c3 => r1   c0 => r2   c1 => r3   c2 => r0
sends    1.5 n      1.5 n      1.5 n      1.5 n
gets     1.5 n      1.5 n      1.5 n      1.5 n
"""


def run_drawing(*arguments: str, status: int = 0) -> Completed:
    command = [sys.executable, "-m", "common.backend.algorithms", *arguments]
    return execution.execute_command(command, env=make_environment(), real_process=True, status=status)


def test_an_algorithm_is_drawn() -> None:
    assert run_drawing("ring", "4").stdout == RING


def test_a_refused_drawing_exits_with_status_2_and_no_traceback() -> None:
    process = run_drawing("ring", "0", status=2)
    assert not process.stdout
    assert process.stderr.startswith("error: argument ranks: expected a number")
    assert process.stderr.count("\n") == 1


Draw = Callable[..., list[str]]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draw:
    """Call the drawing command in this process and return the lines that it prints."""

    def draw_in_process(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["algorithms", *arguments])
        algorithms.main()
        return capsys.readouterr().out.splitlines()

    return draw_in_process


def test_drawings_show_hosts_full_vectors_and_replacements(draw: Draw) -> None:
    two_level = draw("two_level", "4", "2")
    assert two_level[3].split("   ")[-1] == "rank 3, host 1"
    assert two_level[4].startswith("step 1   c2-3 +> r1   ")
    star = draw("star", "3")
    assert star[4:6] == ["step 1   .           all +> r0   .", "step 2   .           .           all +> r0"]
    assert draw("halving_doubling", "3")[0].endswith("(got 3); using ring instead")
    assert draw("tree", "1")[0] == "tree: 1 rank, 1 chunk, 0 steps"


INVALID_ARGUMENTS = {
    "": "the following arguments are required: algorithm, ranks; usage: python -m common.backend",
    "ring 0": "argument ranks: expected a number from 1 to 64, got '0'; usage: ",
    "ring many": "argument ranks: expected a number from 1 to 64, got 'many'; usage: ",
    "ring 4 65": "argument each: expected a number from 1 to 64, got '65'; usage: ",
    "ring 4 2 1": "unrecognized arguments: 1; usage: ",
    "rng 4": "launch.algorithm=rng: expected FILE.py:function or one of ring, ",
    "nowhere.py:f 4": "launch.algorithm=nowhere.py:f: there is no file ",
}


@pytest.mark.parametrize("arguments, message", INVALID_ARGUMENTS.items())
def test_invalid_arguments_are_refused_in_one_line(
    draw: Draw, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        draw(*arguments.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")
