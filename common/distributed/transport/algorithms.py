"""All-reduce algorithms, built-in and custom: building, checking and drawing. Imports no torch.

    python -m common.distributed.transport.algorithms ring 4         draw an algorithm: name, ranks
    python -m common.distributed.transport.algorithms two_level 6 2  the same with two ranks per host
    python -m common.distributed.transport.algorithms mine.py:f 4    a custom algorithm

common/distributed/transport/moves.py defines a move. A custom function gets the number of ranks and returns for each
rank a list of ("send", "receive" or "add", chunk, peer). The number of chunks follows from the moves.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from common.core.errors import UserError, exit_on_user_error
from common.core.own_function import load_function, locate_errors, locate_file_copy, prefer_file_copy
from common.core.text import format_count
from common.distributed.transport.builders import ALGORITHM_NAMES, BUILDERS, Hosts, build_two_level
from common.distributed.transport.moves import Algorithm, Event, Move, describe_move, find_chunk, simulate_algorithm
from common.runs.provenance import copy_function_file
from configs.launch import Launch
from configs.shared import Experiment

__all__ = ["ALGORITHM_NAMES", "Algorithm"]  # imported from here by other packages

USAGE = "function(ranks) returns for each rank a list of ('send', 'receive' or 'add', chunk, peer)"
MAX_CHUNKS = 65_536


def build_algorithm(name: str, size: int, hosts: Hosts = ()) -> Algorithm:
    """Return the algorithm with a name for `size` ranks.

    `hosts` is the host of each rank, for two_level. A custom algorithm is named `FILE.py:function`. Without `hosts`
    each rank is on its own host. Raises UserError if the custom function does not define an all-reduce.
    """
    note = ""
    if name == "halving_doubling" and size & (size - 1):
        name = "ring"
        note = f"halving_doubling needs a power of two ranks, got {size}; using ring instead"
    if len(hosts) not in (0, size):
        raise ValueError(f"hosts has {format_count(len(hosts), 'entry')} for {format_count(size, 'rank')}")
    if name == "two_level":
        return make_algorithm(name, build_two_level(hosts or range(size)))
    if name in BUILDERS:
        return make_algorithm(name, BUILDERS[name](size), note)

    function = load_function("launch.algorithm", name, ", ".join(ALGORITHM_NAMES))
    with locate_errors("launch.algorithm", name, function, USAGE):
        algorithm = make_algorithm(name, function(size))
        if len(algorithm.moves) != size:
            count = format_count(len(algorithm.moves), "list")
            raise UserError(f"returned {count} of moves, needs one for each of {format_count(size, 'rank')}")
        check_algorithm(algorithm)
    return algorithm


def build_by_size(names: str, size: int, hosts: Hosts = ()) -> list[tuple[int, Algorithm]]:
    """Return pairs (smallest vector in bytes, algorithm) in ascending order; the first size is 0.

    `names` is one algorithm, or several separated by sizes in bytes: `tree<65536<ring` is the tree below 65,536 bytes,
    else the ring. Raises UserError.
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


def check_algorithm_of_config(settings: Experiment, code: Path | None = None) -> None:
    """Raise UserError for a config whose all-reduce algorithm cannot work.

    `code` is the source folder of an existing run with this config, which may hold a copy of the custom file.
    """
    launch = use_stored_algorithm_file(settings.launch, code) if code else settings.launch
    if launch.backend == "builtin" and launch.algorithm != "auto":
        size = settings.processes
        hosts = [rank * launch.nodes // size for rank in range(size)]
        build_by_size(launch.algorithm, size, hosts)


def use_stored_algorithm_file(launch: Launch, code: Path) -> Launch:
    """Return the settings with the run's copy of a custom algorithm's file, if any."""
    name = launch.algorithm
    return replace(launch, algorithm=prefer_file_copy(name, locate_file_copy("algorithm", name, code)))


def copy_algorithm_file(launch: Launch, code: Path, *, overwrite: bool = False) -> None:
    """Copy the file of a custom algorithm into a run's source folder.

    An existing copy is overwritten only with `overwrite`. Raises UserError.
    """
    copy_function_file("algorithm", launch.algorithm, code, overwrite=overwrite)


def make_algorithm(name: str, plan: Iterable[Iterable[Sequence[Any]]], note: str = "") -> Algorithm:
    """Build an algorithm from moves given as tuples. Raises TypeError for an invalid move."""
    chunks = 1
    all_moves = []
    for rank_plan in plan:
        moves = tuple(Move(kind, *map(index, numbers)) for kind, *numbers in rank_plan)
        chunks = max([chunks, *(move.chunk + move.chunks for move in moves)])
        all_moves.append(moves)
    return Algorithm(name, chunks, tuple(all_moves), note)


def count_bytes(algorithm: Algorithm, nbytes: int, received: bool = False) -> list[int]:
    """Return the bytes of a vector of `nbytes` that each rank sends, or receives.

    Pass a length in elements to count elements.
    """
    totals = [0] * len(algorithm.moves)
    for rank, moves in enumerate(algorithm.moves):
        for kind, chunk, _, chunks in moves:
            if (kind != "send") == received:
                start, end = find_chunk(nbytes, algorithm.chunks, chunk, chunks)
                totals[rank] += end - start
    return totals


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise UserError unless every rank ends with the same sum over all ranks.

    The message names rank and move. Detects invalid moves, deadlocks, messages that no rank receives or that hold other
    chunks than expected, values that are counted twice or missing, and sums that ranks add up in different order and
    hence round differently.
    """
    check_moves(algorithm)
    contents = compute_sums(algorithm, simulate_algorithm(algorithm))
    all_ranks = (1 << len(contents)) - 1
    for rank, chunks in enumerate(contents):
        for chunk, content in enumerate(chunks):
            origin = "which none of its moves writes"
            if content.writer is not None:
                origin = f"written by its move {content.writer} ({algorithm.moves[rank][content.writer]})"
            if missing := all_ranks & ~content.ranks:
                missing_ranks = ", ".join(str(peer) for peer in range(len(contents)) if missing >> peer & 1)
                raise UserError(
                    f"rank {rank} ends without the values of rank {missing_ranks} in chunk {chunk}, {origin}"
                )
            if content.order != contents[0][chunk].order:
                raise UserError(
                    f"rank {rank} adds up chunk {chunk} in a different order than rank 0, {origin}: the sums would "
                    "round differently; add it up on one rank and send the sum"
                )


def check_moves(algorithm: Algorithm) -> None:
    """Raise UserError for a move with an invalid kind, chunk or peer."""
    size = len(algorithm.moves)
    chunk_count = min(algorithm.chunks, MAX_CHUNKS)
    for rank, moves in enumerate(algorithm.moves):
        for position, (kind, chunk, peer, chunks) in enumerate(moves):
            problem = ""
            if kind not in ("send", "receive", "add"):
                problem = "is none of send, receive, add"
            elif not 0 <= peer < size:
                problem = f"names a rank that does not exist; ranks are 0-{size - 1}"
            elif peer == rank:
                problem = "is a message from a rank to itself"
            elif chunk < 0 or chunks < 1 or chunk + chunks > chunk_count:
                problem = f"names a chunk that does not exist; chunks are 0-{chunk_count - 1}"
            if problem:
                raise UserError(f"{describe_move(algorithm, rank, position)} {problem}")


class ChunkContent(NamedTuple):
    """Content of a chunk on a rank."""

    ranks: int
    """The ranks whose values are added up in it: bit r stands for rank r."""
    order: int
    """Identifies the order of addition: equal numbers round equally. Swapping operands does not change it."""
    writer: int | None
    """Position of the last move that wrote the chunk."""


def compute_sums(algorithm: Algorithm, events: Sequence[Event]) -> list[list[ChunkContent]]:
    """Return the final content of each chunk on each rank.

    Raises UserError for messages that do not match.
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
            raise UserError(f"{event} gets another chunk: the next message is {sent}")
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
        raise UserError(f"{events[number]} is never received by rank {events[number].move.peer}")
    return contents


def draw_algorithm(algorithm: Algorithm, hosts: Hosts = ()) -> list[str]:
    """Return a table of the messages that each rank (column) sends in each step (row).

    In a step a rank sends at most one message and receives at most one.
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
        totals = count_bytes(algorithm, algorithm.chunks, received)  # of a vector with one byte per chunk
        rows.append([name, *(f"{total / algorithm.chunks:.3g} n" for total in totals)])

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    counts = [format_count(len(ranks), "rank"), format_count(algorithm.chunks, "chunk"), format_count(steps, "step")]
    return [
        f"{algorithm.name}: {', '.join(counts)}",
        "c0 +> r1: chunk 0 goes to rank 1, which adds it; c0 => r1: which stores it; n: the bytes of the vector",
        "",
        *("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]


def describe_chunks(algorithm: Algorithm, move: Move) -> str:
    """Return the chunks of a move in few characters: `c0`, `c0-2` or `all`."""
    if move.chunks == algorithm.chunks:
        return "all"
    return f"c{move.chunk}" if move.chunks == 1 else f"c{move.chunk}-{move.chunk + move.chunks - 1}"


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def parse_count(text: str) -> int:
    """Return a number from 1 to 64. Raises argparse's error for other text."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 64, got {text!r}")
    return int(text)


def main() -> None:
    """Draw an all-reduce algorithm: one line per step, one column per rank."""
    parser = OneLineParser(prog="python -m common.distributed.transport.algorithms", description=main.__doc__)
    parser.add_argument("algorithm", help=f"{', '.join(ALGORITHM_NAMES)}, or FILE.py:function")
    parser.add_argument("ranks", type=parse_count, help="1 to 64")
    parser.add_argument("each", type=parse_count, nargs="?", help="ranks per host, for two_level")
    args = parser.parse_args()
    hosts = [rank // args.each for rank in range(args.ranks)] if args.each else []
    algorithm = build_algorithm(args.algorithm, args.ranks, hosts)
    if algorithm.note:
        print(algorithm.note)
    print("\n".join(draw_algorithm(algorithm, hosts)))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
