"""All-reduce algorithms: the built-in ones and those of a user's own file, checked and drawn. Imports no torch.

    python -m common.distributed.transport.algorithms ring 4         draw an algorithm: name, ranks
    python -m common.distributed.transport.algorithms two_level 6 2  the same with two ranks on each host
    python -m common.distributed.transport.algorithms mine.py:f 4    an algorithm of your own

What a move is stands in common/distributed/transport/moves.py. A function of one's own gets the number of ranks and
returns for each of them a list of ("send", "receive" or "add", chunk, peer); there are as many chunks as it names.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from common.core.errors import UserError, exit_on_user_error
from common.core.own_function import find_kept_file, load_function, locate_errors, prefer_kept
from common.core.text import format_count
from common.distributed.transport.builders import BUILDERS, NAMES, build_two_level
from common.distributed.transport.moves import Algorithm, Event, Move, describe_move, find_chunk, simulate_algorithm
from common.runs.provenance import keep_function_file
from configs.launch import Launch
from configs.shared import Experiment

__all__ = ["NAMES", "Algorithm", "Move", "build_algorithm", "check_algorithm", "count_bytes", "find_chunk"]

USAGE = "function(ranks) returns for each rank a list of ('send', 'receive' or 'add', chunk, peer)"
MOST_CHUNKS = 65_536


def build_algorithm(name: str, size: int, hosts: Sequence[Hashable] = ()) -> Algorithm:
    """Return the algorithm of that name for `size` ranks; `hosts`, the host of each rank, is for two_level.

    `FILE.py:function` is a function of a user's own. Raises UserError where it gives no all-reduce. Without `hosts`
    every rank is on a host of its own.
    """
    note = ""
    if name == "halving_doubling" and size & (size - 1):
        name, note = "ring", f"halving_doubling needs a power of two ranks, not {size}: the ring is taken instead"
    if len(hosts) not in (0, size):
        raise ValueError(f"hosts has {format_count(len(hosts), 'entry')} for {format_count(size, 'rank')}")
    if name == "two_level":
        return make_algorithm(name, build_two_level(hosts or range(size)))
    if name in BUILDERS:
        return make_algorithm(name, BUILDERS[name](size), note)
    function = load_function("launch.algorithm", name, ", ".join(NAMES))
    with locate_errors("launch.algorithm", name, function, USAGE):
        algorithm = make_algorithm(name, function(size))
        if len(algorithm.moves) != size:
            given = format_count(len(algorithm.moves), "list")
            raise UserError(f"returned {given} of moves, needs one for each of {format_count(size, 'rank')}")
        check_algorithm(algorithm)
    return algorithm


def build_by_size(names: str, size: int, hosts: Sequence[Hashable] = ()) -> list[tuple[int, Algorithm]]:
    """Return algorithms, each with the bytes of a vector from which on it is taken; the first ones are 0.

    `names` is one algorithm, or several with the bytes between them: `tree<65536<ring` is the tree for fewer than
    65,536 bytes, else the ring. Raises UserError.
    """
    first, *others = [names] if ":" in names else names.split("<")
    bounds, later = others[::2], others[1::2]
    limits = [int(bound) for bound in bounds if bound.isdecimal()]
    grow = len(limits) == len(bounds) == len(later) and limits == sorted({0, *limits})[1:]
    if others and not (grow and {first, *later} <= set(NAMES)):
        raise UserError(
            f"launch.algorithm={names}: several algorithms are written with growing numbers of bytes between them, as "
            f"in tree<65536<ring; there are {', '.join(NAMES)}"
        )
    built = [build_algorithm(name, size, hosts) for name in (first, *later)]
    return list(zip([0, *limits], built, strict=True))


def check_algorithm_of_config(settings: Experiment, code: Path | None = None) -> None:
    """Raise UserError for a config whose all-reduce algorithm cannot work.

    `code` is the source of the run that has these settings already, for the file that it keeps.
    """
    launch = use_kept_file(settings.launch, code) if code else settings.launch
    if launch.backend == "builtin" and launch.algorithm != "auto":
        size = settings.processes
        build_by_size(launch.algorithm, size, [rank * launch.nodes // size for rank in range(size)])


def use_kept_file(launch: Launch, code: Path) -> Launch:
    """Return the settings with the file of a user's own algorithm that a run keeps in its source, if it keeps one."""
    name = launch.algorithm
    return replace(launch, algorithm=prefer_kept(name, find_kept_file("algorithm", name, code)))


def copy_algorithm_file(launch: Launch, code: Path, *, anew: bool = False) -> None:
    """Copy the file of a user's own algorithm into the source of a run, if it is not there yet, or `anew`.

    Raises UserError.
    """
    keep_function_file("algorithm", launch.algorithm, code, anew=anew)


def make_algorithm(name: str, plan: Iterable[Iterable[Sequence[Any]]], note: str = "") -> Algorithm:
    """Return an algorithm whose moves are given as tuples. Raises TypeError for what is no move."""
    moves = tuple(tuple(Move(kind, *map(index, numbers)) for kind, *numbers in mine) for mine in plan)
    return Algorithm(name, max((m.chunk + m.chunks for mine in moves for m in mine), default=1), moves, note)


def count_bytes(algorithm: Algorithm, nbytes: int, received: bool = False) -> list[int]:
    """Return how many bytes of a vector of `nbytes` each rank sends, or receives.

    With a length in elements instead of bytes it counts elements, exactly.
    """
    totals = [0] * len(algorithm.moves)
    for rank, moves in enumerate(algorithm.moves):
        for kind, chunk, _, chunks in moves:
            if (kind != "send") == received:
                begin, end = find_chunk(nbytes, algorithm.chunks, chunk, chunks)
                totals[rank] += end - begin
    return totals


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise UserError, naming rank and move, unless every rank ends with the same sum over all ranks in each chunk.

    Refused are moves that cannot be, deadlocks, messages that nobody takes or that hold other chunks than expected,
    values counted twice or left out, and sums that ranks add up in different order and hence round differently.
    """
    check_moves(algorithm)
    contents = compute_sums(algorithm, simulate_algorithm(algorithm))
    everybody = (1 << len(contents)) - 1
    for rank, held in enumerate(contents):
        for chunk, content in enumerate(held):
            written = "which no move of it writes"
            if content.writer is not None:
                written = f"as left by its move {content.writer} ({algorithm.moves[rank][content.writer]})"
            if missing := everybody & ~content.ranks:
                lacks = ", ".join(str(one) for one in range(len(contents)) if missing >> one & 1)
                raise UserError(f"rank {rank} ends without the values of rank {lacks} in chunk {chunk}, {written}")
            if content.order != contents[0][chunk].order:
                raise UserError(
                    f"rank {rank} ends with chunk {chunk} added up in another order than on rank 0, {written}: "
                    "they would round differently; add it up on one rank and send the sum"
                )


def check_moves(algorithm: Algorithm) -> None:
    """Raise UserError for a move of an unknown kind, or with a chunk or peer that does not exist."""
    size = len(algorithm.moves)
    for rank, moves in enumerate(algorithm.moves):
        for position, (kind, chunk, peer, chunks) in enumerate(moves):
            wrong = ""
            if kind not in ("send", "receive", "add"):
                wrong = "is none of send, receive, add"
            elif not 0 <= peer < size:
                wrong = f"names a rank that does not exist; ranks are 0-{size - 1}"
            elif peer == rank:
                wrong = "is a message of a rank to itself"
            elif chunk < 0 or chunks < 1 or chunk + chunks > min(algorithm.chunks, MOST_CHUNKS):
                wrong = f"names a chunk that does not exist; chunks are 0-{min(algorithm.chunks, MOST_CHUNKS) - 1}"
            if wrong:
                raise UserError(f"{describe_move(algorithm, rank, position)} {wrong}")


class Content(NamedTuple):
    """Content of a chunk on a rank: the ranks whose values are added up in it, their order, and the last move."""

    ranks: int  # bit r stands for rank r
    order: int  # the same number for sums added up alike; swapped operands round alike
    writer: int | None


def compute_sums(algorithm: Algorithm, events: Sequence[Event]) -> list[list[Content]]:
    """Return what each rank holds in each chunk in the end. Raises UserError for messages that do not fit."""
    size = len(algorithm.moves)
    contents = [[Content(1 << rank, rank, None)] * algorithm.chunks for rank in range(size)]
    messages: dict[int, list[Content]] = {}
    orders: dict[tuple[int, int], int] = {}
    for number, (rank, position, move, _, sent_by) in enumerate(events):
        span = slice(move.chunk, move.chunk + move.chunks)
        mine = contents[rank][span]
        if sent_by is None:
            messages[number] = mine
            continue
        source = events[sent_by]
        where = describe_move(algorithm, rank, position)
        if (move.chunk, move.chunks) != (source.move.chunk, source.move.chunks):
            sent = describe_move(algorithm, source.rank, source.position)
            raise UserError(f"{where} gets another chunk: the next message is {sent}")
        for i, (old, new) in enumerate(zip(mine, messages.pop(sent_by), strict=True)):
            ranks, order = new.ranks, new.order
            if move.kind == "add":
                if twice := old.ranks & new.ranks:
                    raise UserError(f"{where} counts the values of rank {twice.bit_length() - 1} twice")
                ranks |= old.ranks
                order = orders.setdefault((min(old.order, order), max(old.order, order)), size + len(orders))
            contents[rank][move.chunk + i] = Content(ranks, order, position)
    for number in messages:
        where = describe_move(algorithm, events[number].rank, events[number].position)
        raise UserError(f"{where} is never taken by rank {events[number].move.peer}")
    return contents


def draw_algorithm(algorithm: Algorithm, hosts: Sequence[Hashable] = ()) -> list[str]:
    """Return a table of text: in each step (a line), what each rank (a column) sends; below, how much in all.

    In a step a rank sends one message at most and gets one at most.
    """
    cells: dict[tuple[int, int], str] = {}
    for rank, _, move, time, sent_by in simulate_algorithm(algorithm):
        if sent_by is not None:
            last = move.chunk + move.chunks - 1
            what = f"c{move.chunk}" if move.chunks == 1 else f"c{move.chunk}-{last}"
            what = "all" if move.chunks == algorithm.chunks else what
            cells[round(time), move.peer] = f"{what} {'+' if move.kind == 'add' else '='}> r{rank}"
    ranks = range(len(algorithm.moves))
    steps = max((step for step, _ in cells), default=0)
    rows = [["", *(f"rank {rank}, host {hosts[rank]}" if hosts else f"rank {rank}" for rank in ranks)]]
    rows += [[f"step {step}", *(cells.get((step, rank), ".") for rank in ranks)] for step in range(1, steps + 1)]
    for name, received in (("sends", False), ("gets", True)):
        totals = count_bytes(algorithm, algorithm.chunks, received)  # of a vector with one byte in each chunk
        rows.append([name, *(f"{total / algorithm.chunks:.3g} n" for total in totals)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    sizes = (len(ranks), "rank"), (algorithm.chunks, "chunk"), (steps, "step")
    return [
        f"{algorithm.name}: {', '.join(format_count(*size) for size in sizes)}",
        "c0 +> r1: chunk 0 goes to rank 1, which adds it; c0 => r1: which stores it; n: the bytes of the vector",
        "",
        *lines,
    ]


class OneLineParser(argparse.ArgumentParser):
    """A parser of arguments whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def parse_count(text: str) -> int:
    """Return a number from 1 to 64. Raises argparse's error for other text."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 64")
    return int(text)


def main() -> None:
    """Draw an all-reduce algorithm: a line for each step, a column for each rank."""
    parser = OneLineParser(prog="python -m common.distributed.transport.algorithms", description=main.__doc__)
    parser.add_argument("algorithm", help=f"{', '.join(NAMES)}, or FILE.py:function")
    parser.add_argument("ranks", type=parse_count, help="1 to 64")
    parser.add_argument("each", type=parse_count, nargs="?", help="ranks on each host, for two_level")
    asked = parser.parse_args()
    hosts = [rank // asked.each for rank in range(asked.ranks)] if asked.each else []
    algorithm = build_algorithm(asked.algorithm, asked.ranks, hosts)
    if algorithm.note:
        print(algorithm.note)
    print("\n".join(draw_algorithm(algorithm, hosts)))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
