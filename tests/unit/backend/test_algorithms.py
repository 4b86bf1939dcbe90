"""All-reduce algorithms as data: sums, bytes and drawing of every built-in one; what is no all-reduce is refused."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
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
from tests.harness.warm import ROOT

SIZES = (*range(1, 9), 16)


def play(algorithm: Algorithm, vectors: list[list[int]]) -> None:
    """Make the moves on lists of numbers, one move of each rank in turn."""
    messages: dict[tuple[int, int], deque[list[int]]] = {}
    left = [deque(moves) for moves in algorithm.moves]
    while any(left):
        before = sum(map(len, left))
        for rank, (moves, vector) in enumerate(zip(left, vectors, strict=True)):
            if not moves:
                continue
            kind, chunk, peer, chunks = moves[0]
            begin, end = compute_chunk_bounds(len(vector), algorithm.chunks, chunk, chunks)
            if kind == "send":
                messages.setdefault((rank, peer), deque()).append(vector[begin:end])
            elif messages.get((peer, rank)):
                got = messages[peer, rank].popleft()
                pairs = zip(vector[begin:end], got, strict=True)
                vector[begin:end] = [a + b for a, b in pairs] if kind == "add" else got
            else:
                continue
            moves.popleft()
        assert sum(map(len, left)) < before, "deadlock"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_every_rank_ends_with_the_sum(name: str, size: int) -> None:
    for each in range(1, size + 1):  # ranks on each host; the last host may have fewer
        algorithm = build_algorithm(name, size, [rank // each for rank in range(size)])
        check_algorithm(algorithm)
        for length in {0, 1, size - 1, size, 2 * size + 1}:
            vectors = [[10**rank * (i + 1) for i in range(length)] for rank in range(size)]
            play(algorithm, vectors)
            assert vectors == [[int("1" * size) * (i + 1) for i in range(length)]] * size
        if name != "two_level":
            break


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_the_formulas(size: int) -> None:
    n = 840 * size
    least = [2 * (size - 1) * n // size] * size
    for name in ("ring", "halving_doubling", "sharded_star", "two_level"):
        algorithm = build_algorithm(name, size)
        assert count_bytes_per_rank(algorithm, n) == count_bytes_per_rank(algorithm, n, received=True) == least, name
    star, tree = build_algorithm("star", size), build_algorithm("tree", size)
    assert (
        count_bytes_per_rank(star, n)
        == count_bytes_per_rank(star, n, received=True)
        == [(size - 1) * n, *[n] * (size - 1)]
    )
    assert (
        sum(count_bytes_per_rank(tree, n)) == 2 * (size - 1) * n
        and count_bytes_per_rank(tree, n)[0] == ceil(log2(size)) * n
    )


@pytest.mark.parametrize(("hosts", "each"), [(1, 4), (2, 2), (4, 2), (3, 3), (2, 8)])
def test_between_hosts_two_level_sends_as_little_as_a_ring_of_the_hosts(hosts: int, each: int) -> None:
    host_of = [rank % hosts for rank in range(hosts * each)]  # in turns: the order of the ranks does not matter
    algorithm = build_algorithm("two_level", hosts * each, host_of)
    n = 840 * algorithm.chunks
    sent = [0] * hosts
    for rank, moves in enumerate(algorithm.moves):
        for kind, _, peer, chunks in moves:
            if kind == "send" and host_of[peer] != host_of[rank]:
                sent[host_of[rank]] += n * chunks // algorithm.chunks
    assert sent == [2 * (hosts - 1) * n // hosts] * hosts
    inside = 2 * (each - 1) / each * n  # of each rank
    assert count_bytes_per_rank(algorithm, n) == [inside + 2 * (hosts - 1) / hosts * n / each] * (hosts * each)


def test_chunks_are_nearly_equal_and_leave_nothing_out() -> None:
    for length in range(20):
        for chunks in range(1, 9):
            parts = [compute_chunk_bounds(length, chunks, chunk) for chunk in range(chunks)]
            assert [i for begin, end in parts for i in range(begin, end)] == list(range(length))
            assert max(end - begin for begin, end in parts) - min(end - begin for begin, end in parts) <= 1
            assert compute_chunk_bounds(length, chunks, 0, chunks) == (0, length)


def test_three_ranks_cannot_halve_and_are_told_so() -> None:
    algorithm = build_algorithm("halving_doubling", 3)
    assert replace(algorithm, note="") == build_algorithm("ring", 3)
    expected = "halving_doubling requires the number of ranks to be a power of two (got 3); using ring instead"
    assert algorithm.note == expected
    assert not build_algorithm("halving_doubling", 4).note


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_every_single_change_of_a_move_is_refused_by_rank(name: str) -> None:
    right = build_algorithm(name, 4, "aabb")
    for rank, moves in enumerate(right.moves):
        for position, move in enumerate(moves):
            changed = [[], [move, move], [move._replace(chunk=move.chunk + 1)], [move._replace(peer=rank)]]
            if move.kind != "send":
                changed.append([move._replace(kind="add" if move.kind == "receive" else "receive")])
            for instead in changed:
                mine = (*moves[:position], *instead, *moves[position + 1 :])
                wrong = replace(right, moves=(*right.moves[:rank], mine, *right.moves[rank + 1 :]))
                with pytest.raises(UserError, match=r"rank \d.* move"):
                    check_algorithm(wrong)


def own(tmp_path: Path, plan: object, size: int) -> Algorithm:
    """Build the algorithm of a file whose function returns the plan."""
    (tmp_path / "own.py").write_text(f"def mine(ranks):\n    return {plan!r}\n")
    return build_algorithm(f"{tmp_path / 'own.py'}:mine", size)


def test_an_algorithm_of_ones_own_is_loaded(tmp_path: Path) -> None:
    """Recursive doubling: all ranks exchange whole vectors, and add them up in pairs of pairs alike."""
    plan = [[(kind, 0, rank ^ far) for far in (1, 2) for kind in ("send", "add")] for rank in range(4)]
    algorithm = own(tmp_path, plan, 4)
    assert algorithm.chunks == 1 and algorithm.moves[3][2] == Move("send", 0, 1)
    assert count_bytes_per_rank(algorithm, 100) == [200] * 4
    assert own(tmp_path, [[]], 1).moves == ((),)


SUM = [("send", 0, 1), ("receive", 0, 1)], [("add", 0, 0), ("send", 0, 0)]


def pass_on(kind: str) -> list[list[tuple[str, int, int]]]:
    """Return three ranks that pass their whole vectors around twice."""
    return [2 * [("send", 0, (rank + 1) % 3), (kind, 0, (rank - 1) % 3)] for rank in range(3)]


MISTAKES: dict[str, tuple[Any, str]] = {
    "all wait first": (
        [[("add", 0, 1), ("send", 0, 1)], [("add", 0, 0), ("send", 0, 0)]],
        "deadlock: rank 0, move 0 (add chunk 0 from rank 1) waits for the message that rank 1 sends in move 1, but "
        "rank 1, move 0 (add chunk 0 from rank 0) comes first and is also waiting (cycle: rank 0 -> rank 1 -> rank 0)",
    ),
    "a circle of some": (
        [[("add", 0, 1)], [("add", 0, 2), ("send", 0, 0), ("send", 0, 2)], [("add", 0, 1), ("send", 0, 1)]],
        "deadlock: rank 1, move 0 (add chunk 0 from rank 2) waits for the message that rank 2 sends in move 1, but "
        "rank 2, move 0 (add chunk 0 from rank 1) comes first and is also waiting (cycle: rank 1 -> rank 2 -> rank 1)",
    ),
    # the ring of PyTorch's first tutorial got every message and added none (pytorch#31572)
    "the old tutorial's ring": (
        pass_on("receive"),
        "rank 0 ends without the values of rank 0, rank 2 in chunk 0; move 3 of rank 0 (receive chunk 0 from rank 2) "
        "is the last to write this chunk",
    ),
    "whole sums around the ring": (
        pass_on("add"),
        "rank 2, move 3 (add chunk 0 from rank 1) counts the values of rank 1 twice",
    ),
    "a chunk that nobody adds": (
        [[("send", 0, 1), ("send", 2, 1), *SUM[0][1:]], [SUM[1][0], ("receive", 2, 0), SUM[1][1]]],
        "rank 0 ends without the values of rank 1 in chunk 1; no move of rank 0 writes this chunk",
    ),
    "another chunk": (
        [[("send", 0, 1), ("send", 1, 1)], [("add", 1, 0), ("add", 0, 0)]],
        "rank 1, move 0 (add chunk 1 from rank 0) receives the wrong chunk: the next message was sent by rank "
        "0, move 0 (send chunk 0 to rank 1)",
    ),
    "fewer chunks than were sent": (
        [[("send", 0, 1, 2)], [("add", 0, 0)]],
        "rank 1, move 0 (add chunk 0 from rank 0) receives the wrong chunk: the next message was sent by rank "
        "0, move 0 (send chunks 0-1 to rank 1)",
    ),
    "to itself": (
        [[("send", 0, 0)], []],
        "rank 0, move 0 (send chunk 0 to rank 0): a rank cannot exchange a message with itself",
    ),
    "to nobody": ([[], [("send", 0, 2)]], "rank 1, move 0 (send chunk 0 to rank 2): rank 2 does not exist; the"),
    "never sent": (
        [[SUM[0][0]], [*SUM[1], ("add", 0, 0)]],
        "rank 1, move 2 (add chunk 0 from rank 0) waits forever, because rank 0 sends no further message to rank 1",
    ),
    "never taken": (
        [[*SUM[0]], [*SUM[1], ("send", 0, 0)]],
        "rank 0 never receives the message of rank 1, move 2 (send chunk 0 to rank 0)",
    ),
    "in its own order": (
        [[("send", 0, a), ("send", 0, b), ("add", 0, a), ("add", 0, b)] for a, b in ((1, 2), (0, 2), (0, 1))],
        "rank 2 adds up chunk 0 in a different order than rank 0, so the two sums would round differently; add up the "
        "chunk on one rank and send the sum to all others (move 3 of rank 2 (add chunk 0 from rank 1) is the last",
    ),
    "no such kind": (
        [[("give", 0, 1)], []],
        "rank 0, move 0 (give chunk 0 from rank 1): the kind of a move must be send, receive or add",
    ),
    "below the first chunk": ([[("send", -1, 1)], []], "rank 0, move 0 (send chunk -1 to rank 1): the move uses"),
    "no chunk at all": ([[("send", 0, 1, 0)], []], "the move uses a chunk that does not exist"),
    "too many chunks": ([[("send", 0, 1, 10**12)], []], "a chunk that does not exist; the chunks are 0-65535"),
    "a rank too few": ([[]], "the function must return one list of moves per rank (got 1 list for 2 ranks)"),
    "half a chunk": ([[("send", 0.5, 1)], []], f"interpreted as an integer; {algorithms.USAGE}"),
    "no peer": ([[("send", 0)], []], f"'peer'; {algorithms.USAGE}"),
    "nothing": (None, f"'NoneType' object is not iterable; {algorithms.USAGE}"),
}


@pytest.mark.parametrize(("plan", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_naming_rank_and_move(tmp_path: Path, plan: Any, message: str) -> None:
    size = len(plan) if plan and len(plan) > 1 else 2
    with pytest.raises(UserError) as caught:
        own(tmp_path, plan, size)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"launch.algorithm={tmp_path / 'own.py'}:mine: {tmp_path / 'own.py'}:1: ")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UserError,
        match=r"launch\.algorithm=rng: expected FILE\.py:function or one of ring, halving_doubling, tree, star",
    ):
        build_algorithm("rng", 4)


def test_algorithms_by_size_are_read() -> None:
    (least, tree), (more, ring) = build_algorithms_by_size("tree<65536<ring", 4)
    assert (least, more) == (0, 65536) and (tree, ring) == (build_algorithm("tree", 4), build_algorithm("ring", 4))
    assert build_algorithms_by_size("star", 3) == [(0, build_algorithm("star", 3))]


@pytest.mark.parametrize(
    "names", ["tree<ring", "tree<64", "tree<9<ring<9<star", "tree<0<ring", "tree<x<ring", "tree<4<oak", "<4<ring"]
)
def test_algorithms_by_size_that_cannot_be_read_are_refused(names: str) -> None:
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
WORDS = [sys.executable, "-m", "common.backend.algorithms"]


def test_an_algorithm_is_drawn() -> None:
    done = subprocess.run([*WORDS, "ring", "4"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == RING


def draw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["algorithms", *words])
    algorithms.main()
    return capsys.readouterr().out.splitlines()


def test_drawings_show_hosts_whole_vectors_and_what_is_taken_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = draw(monkeypatch, capsys, "two_level", "4", "2")
    assert lines[3].split("   ")[-1] == "rank 3, host 1" and lines[4].startswith("step 1   c2-3 +> r1   ")
    lines = draw(monkeypatch, capsys, "star", "3")
    assert lines[4:6] == ["step 1   .           all +> r0   .", "step 2   .           .           all +> r0"]
    assert draw(monkeypatch, capsys, "halving_doubling", "3")[0].endswith("(got 3); using ring instead")
    assert draw(monkeypatch, capsys, "tree", "1")[0] == "tree: 1 rank, 1 chunk, 0 steps"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: algorithm, ranks; usage: python -m common.backend"),
        ("ring 0", "argument ranks: expected a number from 1 to 64, got '0'; usage: "),
        ("ring many", "argument ranks: expected a number from 1 to 64, got 'many'; usage: "),
        ("ring 4 65", "argument each: expected a number from 1 to 64, got '65'; usage: "),
        ("ring 4 2 1", "unrecognized arguments: 1; usage: "),
        ("rng 4", "launch.algorithm=rng: expected FILE.py:function or one of ring, "),
        ("nowhere.py:f 4", "launch.algorithm=nowhere.py:f: there is no file "),
    ],
)
def test_bad_arguments_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        draw(monkeypatch, capsys, *words.split())
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_a_refused_drawing_has_status_2_and_no_traceback() -> None:
    done = subprocess.run([*WORDS, "ring", "0"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: argument ranks: expected a number") and done.stderr.count("\n") == 1
