"""Predicted times of all-reduces: lines fitted to measured messages, and a simulation of an algorithm's messages.

A message of n bytes takes alpha + beta n seconds (Hockney 1994, "The communication challenge for MPP: Intel Paragon
and Meiko CS-2", doi:10.1016/S0167-8191(06)80021-9). It has the outgoing cable of its sender and the incoming cable of
its target for that long, and each of them carries one message at a time. Computing is part of the fitted lines: it
takes no time of its own. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from common.core.errors import UserError
from common.distributed.transport.algorithms import build_algorithm
from common.distributed.transport.moves import Algorithm, Move, Route, simulate_algorithm

SIZES = tuple(4**power for power in range(1, 14))  # bytes for which an algorithm is chosen: 4 bytes to 64 MiB
MOST_MOVES = 20_000  # of all ranks: an algorithm with more is simulated for two sizes alone, with a line between them
LONGEST = 256  # ranks beyond which algorithms whose moves grow with their square are left out: it takes too long
WORTH = 0.99  # of the seconds of an algorithm, below which another one is taken instead


class Line(NamedTuple):
    """The time of a message: alpha seconds, and beta seconds for each byte."""

    alpha: float
    beta: float

    def predict_seconds(self, nbytes: float) -> float:
        """Return the seconds of one message of that many bytes."""
        return self.alpha + self.beta * nbytes


class Lines(NamedTuple):
    """The lines of the links between hosts and, where it was measured, of those inside a host."""

    between: Line
    within: Line | None = None


def fit_line(measured: Sequence[tuple[float, float]]) -> Line:
    """Fit alpha and beta to (bytes, seconds) of single messages, so that the sum of squared relative errors is least.

    Relative errors, because absolute ones would leave alpha to chance: a thousandth of the longest time is many times
    alpha. Neither is negative: where the best line has one below 0, it is the best line with 0 there. Raises UserError
    for fewer than two sizes.
    """
    if len({nbytes for nbytes, _ in measured}) < 2 or min(seconds for _, seconds in measured) <= 0:
        raise UserError(f"a line needs times above 0 of at least two sizes, not {list(measured)}; measure more sizes")
    weights = [seconds**-2 for _, seconds in measured]

    def average(values: Sequence[float]) -> float:
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    sizes, times = [float(nbytes) for nbytes, _ in measured], [seconds for _, seconds in measured]
    size, time = average(sizes), average(times)
    spread = average([(n - size) ** 2 for n in sizes])
    beta = average([(n - size) * (t - time) for n, t in zip(sizes, times, strict=True)]) / spread
    if beta < 0:
        return Line(time, 0.0)
    if time < beta * size:
        return Line(0.0, average([n * t for n, t in zip(sizes, times, strict=True)]) / average([n * n for n in sizes]))
    return Line(time - beta * size, beta)


def predict_seconds(algorithm: Algorithm, lines: Lines, nbytes: float, hosts: Sequence[Hashable] = ()) -> float:
    """Return the seconds of an all-reduce of `nbytes`.

    Ranks of one host (`hosts` has that of each rank) share the host's cable, and have for messages inside the host a
    way of their own with its own line. Without `hosts` every rank is on a host of its own.
    """
    host_of = hosts or range(len(algorithm.moves))

    def find_route(source: int, target: int, move: Move) -> Route:
        size = nbytes * move.chunks / algorithm.chunks
        if host_of[source] != host_of[target]:
            return Route(("host", host_of[source]), ("host", host_of[target]), lines.between.predict_seconds(size))
        return Route(("rank", source), ("rank", target), (lines.within or lines.between).predict_seconds(size))

    return max((event.time for event in simulate_algorithm(algorithm, find_route)), default=0.0)


def choose_by_size(lines: Lines, names: Sequence[str], size: int, hosts: Sequence[Hashable] = ()) -> str:
    """Return the algorithms of the least time for each of SIZES, as `launch.algorithm` takes them: `tree<65536<ring`.

    One that is less than a hundredth faster than that of the size before is not worth a change; of equal ones the
    first is taken. With more than LONGEST ranks, ring and sharded_star are left out, and two_level where ranks times
    hosts are more than LONGEST**2; rank 0 simulates them while the others wait.
    """
    known = {name: build_algorithm(name, size, hosts) for name in names if is_cheap_to_simulate(name, size, hosts)}
    built = {name: algorithm for name, algorithm in known.items() if not algorithm.note}  # else another one stands in
    predicted = {name: predict_sizes(algorithm, lines, hosts) for name, algorithm in built.items()}
    chosen: list[str] = []
    for position, nbytes in enumerate(SIZES):
        seconds = {name: values[position] for name, values in predicted.items()}
        best = min(built, key=lambda name: WORTH * seconds[name] if name in chosen[-1:] else seconds[name])
        if best not in chosen[-1:]:
            chosen += [str(nbytes), best] if chosen else [best]
    return "<".join(chosen)


def is_cheap_to_simulate(name: str, size: int, hosts: Sequence[Hashable]) -> bool:
    """Check that a built-in algorithm has not too many moves to be simulated: size**2, for two_level size * hosts."""
    hosts_or_ranks = len(set(hosts)) if name == "two_level" and hosts else size
    grows = name in ("ring", "sharded_star", "two_level") or (name == "halving_doubling" and size & (size - 1))
    return not grows or size * hosts_or_ranks <= LONGEST**2


def predict_sizes(algorithm: Algorithm, lines: Lines, hosts: Sequence[Hashable]) -> list[float]:
    """Return the seconds of an all-reduce of each of SIZES."""
    if sum(map(len, algorithm.moves)) <= MOST_MOVES:
        return [predict_seconds(algorithm, lines, nbytes, hosts) for nbytes in SIZES]
    least, most = (predict_seconds(algorithm, lines, nbytes, hosts) for nbytes in (SIZES[0], SIZES[-1]))
    return [least + (most - least) * (nbytes - SIZES[0]) / (SIZES[-1] - SIZES[0]) for nbytes in SIZES]
