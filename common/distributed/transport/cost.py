"""Predicted times of all-reduces: lines fitted to measured messages, and a simulation. Imports no torch.

A message of n bytes takes alpha + beta n seconds (Hockney 1994, "The communication challenge for MPP: Intel Paragon
and Meiko CS-2", doi:10.1016/S0167-8191(06)80021-9). For that time it occupies the outgoing cable of its sender and the
incoming cable of its target, each of which carries one message at a time. The fitted lines include computation, which
takes no additional time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.core.errors import UserError
from common.distributed.transport.algorithms import build_algorithm
from common.distributed.transport.builders import Hosts
from common.distributed.transport.moves import Algorithm, CableRoute, Move, simulate_algorithm

VECTOR_SIZES = tuple(4**power for power in range(1, 14))  # bytes for which an algorithm is chosen: 4 bytes to 64 MiB
MAX_MOVES = 20_000  # of all ranks; an algorithm with more is simulated for two sizes and interpolated
MAX_RANKS = 256  # above it, algorithms with a quadratic number of moves are excluded: simulating them takes too long
SWITCH_RATIO = 0.99  # another algorithm is chosen only if its time is below this share


class MessageTimeLine(NamedTuple):
    """The time of a message: alpha seconds, plus beta seconds per byte."""

    alpha: float
    beta: float

    def predict_seconds(self, nbytes: float) -> float:
        """Return the seconds of one message of `nbytes`."""
        return self.alpha + self.beta * nbytes


class MessageTimeLines(NamedTuple):
    """The line of links between hosts and, if measured, that of links within a host."""

    between_hosts: MessageTimeLine
    within_host: MessageTimeLine | None = None


def fit_line(measured: Sequence[tuple[float, float]]) -> MessageTimeLine:
    """Fit alpha and beta to (bytes, seconds) of messages by least squares of relative errors.

    Absolute errors would leave alpha to chance: a thousandth of the longest time is many times alpha. Neither parameter
    is negative: if the best line has a negative one, the result is the best line with 0 in its place.
    Raises UserError for fewer than two sizes.
    """
    sizes = [float(nbytes) for nbytes, _ in measured]
    times = [seconds for _, seconds in measured]
    if len(set(sizes)) < 2 or min(times) <= 0:
        raise UserError(
            f"fitting a line needs positive times of at least two sizes, got {list(measured)}; measure more sizes"
        )
    weights = [seconds**-2 for seconds in times]

    def average_products(left: Sequence[float], right: Sequence[float]) -> float:
        products = (weight * (a * b) for weight, a, b in zip(weights, left, right, strict=True))
        return sum(products) / sum(weights)

    ones = [1.0] * len(sizes)
    mean_size = average_products(ones, sizes)
    mean_time = average_products(ones, times)
    centred_sizes = [nbytes - mean_size for nbytes in sizes]
    centred_times = [seconds - mean_time for seconds in times]
    beta = average_products(centred_sizes, centred_times) / average_products(centred_sizes, centred_sizes)
    if beta < 0:
        return MessageTimeLine(mean_time, 0.0)
    if mean_time < beta * mean_size:
        return MessageTimeLine(0.0, average_products(sizes, times) / average_products(sizes, sizes))
    return MessageTimeLine(mean_time - beta * mean_size, beta)


def predict_seconds(algorithm: Algorithm, lines: MessageTimeLines, nbytes: float, hosts: Hosts = ()) -> float:
    """Return the seconds of an all-reduce of `nbytes`.

    Ranks of one host (`hosts` has the host of each rank) share the host's cable. Messages within a host do not use it;
    they have their own line. Without `hosts` each rank is on its own host.
    """
    host_of = hosts or range(len(algorithm.moves))

    def find_route(source: int, target: int, move: Move) -> CableRoute:
        message_bytes = nbytes * move.chunks / algorithm.chunks
        source_host = host_of[source]
        target_host = host_of[target]
        if source_host != target_host:
            seconds = lines.between_hosts.predict_seconds(message_bytes)
            return CableRoute(("host", source_host), ("host", target_host), seconds)
        seconds = (lines.within_host or lines.between_hosts).predict_seconds(message_bytes)
        return CableRoute(("rank", source), ("rank", target), seconds)

    events = simulate_algorithm(algorithm, find_route)
    return max((event.time for event in events), default=0.0)


def choose_by_size(lines: MessageTimeLines, names: Sequence[str], size: int, hosts: Hosts = ()) -> str:
    """Return the fastest algorithm for each of VECTOR_SIZES in the format of `launch.algorithm`: `tree<65536<ring`.

    The choice changes only if another algorithm is at least a hundredth faster than that of the previous size; of equal
    ones the first is chosen. With more than MAX_RANKS ranks, ring and sharded_star are excluded, and two_level if
    ranks times hosts exceed MAX_RANKS**2, because rank 0 simulates them while the others wait.
    """
    predicted: dict[str, list[float]] = {}
    for name in names:
        if is_cheap_to_simulate(name, size, hosts):
            algorithm = build_algorithm(name, size, hosts)
            if not algorithm.note:  # else another algorithm replaces it
                predicted[name] = predict_sizes(algorithm, lines, hosts)

    current = ""
    choices: list[str] = []
    for position, nbytes in enumerate(VECTOR_SIZES):
        seconds = {name: times[position] for name, times in predicted.items()}
        if current:
            seconds[current] *= SWITCH_RATIO
        best = min(seconds, key=seconds.__getitem__)
        if best != current:
            choices += [str(nbytes), best] if current else [best]
            current = best
    return "<".join(choices)


def is_cheap_to_simulate(name: str, size: int, hosts: Hosts) -> bool:
    """Return whether a built-in algorithm has few enough moves to be simulated.

    The number of moves is size**2, and size * hosts for two_level; the others grow more slowly.
    """
    hosts_or_ranks = len(set(hosts)) if name == "two_level" and hosts else size
    falls_back_to_ring = name == "halving_doubling" and size & (size - 1)
    is_quadratic = falls_back_to_ring or name in ("ring", "sharded_star", "two_level")
    return not is_quadratic or size * hosts_or_ranks <= MAX_RANKS**2


def predict_sizes(algorithm: Algorithm, lines: MessageTimeLines, hosts: Hosts) -> list[float]:
    """Return the seconds of an all-reduce of each of VECTOR_SIZES."""
    if sum(map(len, algorithm.moves)) <= MAX_MOVES:
        return [predict_seconds(algorithm, lines, nbytes, hosts) for nbytes in VECTOR_SIZES]
    first_seconds = predict_seconds(algorithm, lines, VECTOR_SIZES[0], hosts)
    last_seconds = predict_seconds(algorithm, lines, VECTOR_SIZES[-1], hosts)
    added_seconds = last_seconds - first_seconds
    added_bytes = VECTOR_SIZES[-1] - VECTOR_SIZES[0]
    return [first_seconds + added_seconds * (nbytes - VECTOR_SIZES[0]) / added_bytes for nbytes in VECTOR_SIZES]
