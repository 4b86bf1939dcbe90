"""Build, check and draw all-reduce algorithms: built-in (`builtin`) and custom ones. This package imports no torch.

    python -m common.backend.algorithms ring 4         draw the ring of 4 ranks
    python -m common.backend.algorithms two_level 6 2  draw two_level for 6 ranks, 2 ranks per host
    python -m common.backend.algorithms mine.py:f 4    draw the custom algorithm f for 4 ranks

Moves are defined in `moves`. A custom function takes the number of ranks and returns, for each rank, a list of tuples
("send", "receive" or "add", chunk, peer). The number of chunks is the highest chunk number plus one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NamedTuple, NoReturn

from common.backend.algorithms.builtin import ALGORITHM_NAMES, BUILDERS, Hosts, build_two_level
from common.backend.algorithms.moves import (
    Algorithm,
    CompletedMove,
    Move,
    compute_chunk_bounds,
    describe_move,
    simulate_algorithm,
)
from common.config.custom_function import (
    convert_errors_of_user_file,
    load_function,
)
from common.system.errors import UserError
from common.system.text import format_count
from configs.shared import Experiment

__all__ = ["ALGORITHM_NAMES", "Algorithm"]  # re-exported for other packages

USAGE = (
    "function(ranks) must return, for each rank, a list of tuples (action, chunk, peer), where action is 'send', "
    "'receive' or 'add'"
)
MAX_CHUNKS = 65_536


def build_algorithm(name: str, size: int, hosts: Hosts = ()) -> Algorithm:
    """Return the algorithm called `name` for `size` ranks.

    The name of a custom algorithm is `FILE.py:function`. `hosts[r]` is the host of rank r and affects only two_level.
    Without `hosts`, each rank is assumed to be on a separate host. Raises UserError if a custom function does not
    define a valid all-reduce.
    """
    note = ""
    if name == "halving_doubling" and size & (size - 1):
        name = "ring"
        note = f"halving_doubling requires the number of ranks to be a power of two (got {size}); using ring instead"
    if len(hosts) not in (0, size):
        entries = format_count(len(hosts), "entry")
        raise ValueError(f"hosts must have one entry per rank (got {entries} for {format_count(size, 'rank')})")
    if name == "two_level":
        return make_algorithm_from_tuples(name, build_two_level(hosts or range(size)))
    if name in BUILDERS:
        return make_algorithm_from_tuples(name, BUILDERS[name](size), note)

    function = load_function("launch.algorithm", name, ", ".join(ALGORITHM_NAMES))
    with convert_errors_of_user_file("launch.algorithm", name, function, USAGE):
        algorithm = make_algorithm_from_tuples(name, function(size))
        if len(algorithm.moves) != size:
            count = format_count(len(algorithm.moves), "list")
            ranks = format_count(size, "rank")
            raise UserError(f"the function must return one list of moves per rank (got {count} for {ranks})")
        check_algorithm(algorithm)
    return algorithm


def build_algorithms_by_size(names: str, size: int, hosts: Hosts = ()) -> list[tuple[int, Algorithm]]:
    """Return pairs (minimum vector size in bytes, algorithm) in ascending order of size.

    The first size is 0. `names` contains the name of one algorithm, or several names separated by sizes in bytes. For
    example, `tree<65536<ring` selects the tree for vectors below 65,536 bytes and the ring for all others. Raises
    UserError if `names` is invalid.
    """
    parts = [names] if ":" in names else names.split("<")
    algorithm_names = parts[::2]
    bounds = parts[1::2]
    limits = [0, *(int(bound) for bound in bounds if bound.isdecimal())]
    are_ascending = len(limits) == len(algorithm_names) == len(bounds) + 1 and limits == sorted(set(limits))
    if bounds and not (are_ascending and set(algorithm_names) <= set(ALGORITHM_NAMES)):
        raise UserError(
            f"launch.algorithm={names}: several algorithms must be separated by ascending sizes in bytes, as in "
            f"tree<65536<ring; available: {', '.join(ALGORITHM_NAMES)}"
        )
    return [(limit, build_algorithm(name, size, hosts)) for limit, name in zip(limits, algorithm_names, strict=True)]


def check_algorithm_of_config(settings: Experiment) -> None:
    """Raise UserError if the all-reduce algorithm of a config is invalid."""
    launch = settings.launch
    if launch.backend == "builtin" and launch.algorithm != "auto":
        size = settings.processes
        hosts = [rank * launch.nodes // size for rank in range(size)]
        build_algorithms_by_size(launch.algorithm, size, hosts)


def make_algorithm_from_tuples(name: str, plan: Iterable[Iterable[Sequence[Any]]], note: str = "") -> Algorithm:
    """Build an algorithm from each rank's moves, given as tuples. Raises TypeError if a move is invalid."""
    chunks = 1
    all_moves = []
    for rank_plan in plan:
        moves = tuple(Move(kind, *map(index, numbers)) for kind, *numbers in rank_plan)
        chunks = max([chunks, *(move.chunk + move.chunks for move in moves)])
        all_moves.append(moves)
    return Algorithm(name, chunks, tuple(all_moves), note)


def count_bytes_per_rank(algorithm: Algorithm, nbytes: int, received: bool = False) -> list[int]:
    """Return the number of bytes that each rank sends during an all-reduce of a vector of `nbytes` bytes.

    If `received` is true, return the number of bytes that each rank receives instead. To count elements instead of
    bytes, pass the number of elements as `nbytes`.
    """
    totals = [0] * len(algorithm.moves)
    for rank, moves in enumerate(algorithm.moves):
        for kind, chunk, _, chunks in moves:
            if (kind != "send") == received:
                start, end = compute_chunk_bounds(nbytes, algorithm.chunks, chunk, chunks)
                totals[rank] += end - start
    return totals


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise UserError unless the algorithm leaves the same sum over all ranks on every rank.

    The error message names the rank and the move. This function detects:

    - invalid moves and deadlocks;
    - messages that no rank receives, and messages that contain unexpected chunks;
    - values that are missing or counted twice;
    - sums that different ranks compute in different orders, which would lead to different rounding errors.
    """
    check_moves(algorithm)
    contents = compute_chunk_contents(algorithm, simulate_algorithm(algorithm))
    all_ranks = (1 << len(contents)) - 1
    for rank, chunks in enumerate(contents):
        for chunk, content in enumerate(chunks):
            origin = f"no move of rank {rank} writes this chunk"
            if content.writer is not None:
                last_move = algorithm.moves[rank][content.writer]
                origin = f"move {content.writer} of rank {rank} ({last_move}) is the last to write this chunk"
            if missing := all_ranks & ~content.ranks:
                missing_ranks = ", ".join(f"rank {peer}" for peer in range(len(contents)) if missing >> peer & 1)
                raise UserError(f"rank {rank} ends without the values of {missing_ranks} in chunk {chunk}; {origin}")
            if content.order != contents[0][chunk].order:
                raise UserError(
                    f"rank {rank} adds up chunk {chunk} in a different order than rank 0, so the two sums would round "
                    f"differently; add up the chunk on one rank and send the sum to all others ({origin})"
                )


def check_moves(algorithm: Algorithm) -> None:
    """Raise UserError if a move has an invalid kind, chunk or peer."""
    size = len(algorithm.moves)
    chunk_count = min(algorithm.chunks, MAX_CHUNKS)
    for rank, moves in enumerate(algorithm.moves):
        for position, (kind, chunk, peer, chunks) in enumerate(moves):
            problem = ""
            if kind not in ("send", "receive", "add"):
                problem = "the kind of a move must be send, receive or add"
            elif not 0 <= peer < size:
                problem = f"rank {peer} does not exist; the ranks are 0-{size - 1}"
            elif peer == rank:
                problem = "a rank cannot exchange a message with itself"
            elif chunk < 0 or chunks < 1 or chunk + chunks > chunk_count:
                problem = f"the move uses a chunk that does not exist; the chunks are 0-{chunk_count - 1}"
            if problem:
                raise UserError(f"{describe_move(algorithm, rank, position)}: {problem}")


class ChunkContent(NamedTuple):
    """Content of one chunk on one rank, as computed by `compute_chunk_contents`."""

    ranks: int
    """Bit mask of the ranks whose values the chunk includes: bit r represents rank r."""
    order: int
    """Number that identifies the order of addition. Chunks with the same number have the same rounding errors.

    Swapping the two operands of an addition does not change this number.
    """
    writer: int | None
    """Position of the rank's last move that wrote the chunk; None if no move wrote the chunk."""


def compute_chunk_contents(algorithm: Algorithm, events: Sequence[CompletedMove]) -> list[list[ChunkContent]]:
    """Return the final content of each chunk on each rank.

    Raises UserError if a message does not match the move that receives the message.
    """
    size = len(algorithm.moves)
    contents = [[ChunkContent(1 << rank, rank, None)] * algorithm.chunks for rank in range(size)]
    messages: dict[int, list[ChunkContent]] = {}
    orders: dict[tuple[int, int], int] = {}
    for number, event in enumerate(events):
        rank, position, move, _, sent_by = event
        local = contents[rank][move.chunk : move.chunk + move.chunks]
        if sent_by is None:
            messages[number] = local
            continue
        sent = events[sent_by]
        if (move.chunk, move.chunks) != (sent.move.chunk, sent.move.chunks):
            raise UserError(f"{event} receives the wrong chunk: the next message was sent by {sent}")
        for offset, received in enumerate(messages.pop(sent_by)):
            ranks = received.ranks
            order = received.order
            if move.kind == "add":
                previous = local[offset]
                if duplicates := previous.ranks & ranks:
                    raise UserError(f"{event} counts the values of rank {duplicates.bit_length() - 1} twice")
                ranks |= previous.ranks
                operands = (min(previous.order, order), max(previous.order, order))
                order = orders.setdefault(operands, size + len(orders))
            contents[rank][move.chunk + offset] = ChunkContent(ranks, order, position)
    for number in messages:
        raise UserError(f"rank {events[number].move.peer} never receives the message of {events[number]}")
    return contents


def draw_algorithm(algorithm: Algorithm, hosts: Hosts = ()) -> list[str]:
    """Return a table, as text lines, that shows which message each rank sends in each step.

    The table has one row per step and one column per rank. Within a step, each rank sends at most one message and
    receives at most one message.
    """
    cells: dict[tuple[int, int], str] = {}
    for rank, _, move, time, sent_by in simulate_algorithm(algorithm):
        if sent_by is not None:
            arrow = "+>" if move.kind == "add" else "=>"
            cells[round(time), move.peer] = f"{describe_chunks(algorithm, move)} {arrow} r{rank}"
    steps = max((step for step, _ in cells), default=0)

    ranks = range(len(algorithm.moves))
    titles = [f"rank {rank}, host {hosts[rank]}" if hosts else f"rank {rank}" for rank in ranks]
    rows = [["", *titles]]
    for step in range(1, steps + 1):
        rows.append([f"step {step}", *(cells.get((step, rank), ".") for rank in ranks)])
    for name, received in (("sends", False), ("gets", True)):
        totals = count_bytes_per_rank(algorithm, algorithm.chunks, received)  # for a vector with one byte per chunk
        rows.append([name, *(f"{total / algorithm.chunks:.3g} n" for total in totals)])

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    counts = [format_count(len(ranks), "rank"), format_count(algorithm.chunks, "chunk"), format_count(steps, "step")]
    return [
        f"{algorithm.name}: {', '.join(counts)}",
        "c0 +> r1: rank 1 receives chunk 0 and adds it; c0 => r1: rank 1 stores it; n: size of the vector in bytes",
        "",
        *("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]


def describe_chunks(algorithm: Algorithm, move: Move) -> str:
    """Return a short label for the chunks of a move: `c0`, `c0-2` or `all`."""
    if move.chunks == algorithm.chunks:
        return "all"
    return f"c{move.chunk}" if move.chunks == 1 else f"c{move.chunk}-{move.chunk + move.chunks - 1}"


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports each error as a one-line UserError."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the message and the usage of the command."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def parse_count(text: str) -> int:
    """Parse an integer from 1 to 64. Raises argparse.ArgumentTypeError if the text is invalid."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 64, got {text!r}")
    return int(text)


def main() -> None:
    """Draw an all-reduce algorithm as a table with one row per step and one column per rank."""
    parser = OneLineParser(prog="python -m common.backend.algorithms", description=main.__doc__)
    parser.add_argument("algorithm", help=f"algorithm to draw: {', '.join(ALGORITHM_NAMES)} or FILE.py:function")
    parser.add_argument("ranks", type=parse_count, help="number of ranks, from 1 to 64")
    parser.add_argument("each", type=parse_count, nargs="?", help="number of ranks per host, used by two_level")
    args = parser.parse_args()
    hosts = [rank // args.each for rank in range(args.ranks)] if args.each else []
    algorithm = build_algorithm(args.algorithm, args.ranks, hosts)
    if algorithm.note:
        print(algorithm.note)
    print("\n".join(draw_algorithm(algorithm, hosts)))
