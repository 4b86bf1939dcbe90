"""Predict the time of an all-reduce from measured message times. This module does not import torch.

A message of n bytes takes alpha + beta n seconds (Hockney 1994, "The communication challenge for MPP: Intel Paragon and
Meiko CS-2", doi:10.1016/S0167-8191(06)80021-9). The parameters alpha and beta are fitted to measured times, and the
all-reduce is then simulated. While a message is being sent, the outgoing cable of the sender and the incoming cable of
the target are occupied. Each cable carries one message at a time. Computation takes no additional time in the
simulation, because the measured times already include it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.backend.algorithms import build_algorithm
from common.backend.algorithms.builtin import Hosts
from common.backend.algorithms.moves import Algorithm, CableRoute, Move, simulate_algorithm
from common.system.errors import UserError

VECTOR_SIZES = tuple(4**power for power in range(1, 14))  # from 4 bytes to 64 MiB; an algorithm is chosen for each size
MAX_MOVES = 20_000  # moves of all ranks; with more moves, only two sizes are simulated and the others are interpolated
MAX_RANKS = 256  # for more ranks, the simulation of algorithms with a quadratic number of moves takes too long
SWITCH_RATIO = 0.99  # switch to another algorithm only if it takes less than this fraction of the current one's time


class MessageTimeLine(NamedTuple):
    """Linear model of the time of a message: alpha seconds plus beta seconds per byte."""

    alpha: float
    beta: float

    def predict_seconds(self, nbytes: float) -> float:
        """Return the predicted time of a message of `nbytes` bytes, in seconds."""
        return self.alpha + self.beta * nbytes


class MessageTimeLines(NamedTuple):
    """Models for messages between hosts and, if measured, for messages within a host."""

    between_hosts: MessageTimeLine
    within_host: MessageTimeLine | None = None


def fit_message_time_line(measured: Sequence[tuple[float, float]]) -> MessageTimeLine:
    """Fit alpha and beta to measured (bytes, seconds) pairs by minimizing the squared relative errors.

    With absolute errors, alpha would be inaccurate, because an error of 0.1% in the longest time can exceed alpha.
    Neither parameter is negative: if the best fit has a negative parameter, the result is the best fit in which this
    parameter is 0. Raises UserError if there are fewer than two different sizes or if a time is not positive.
    """
    sizes = [float(nbytes) for nbytes, _ in measured]
    times = [seconds for _, seconds in measured]
    if len(set(sizes)) < 2 or min(times) <= 0:
        raise UserError(
            f"fitting a line requires positive times for at least two sizes (got {list(measured)}); measure more sizes"
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
    """Return the predicted time of an all-reduce of `nbytes` bytes, in seconds.

    `hosts[r]` is the host of rank r. Without `hosts`, each rank is assumed to be on a separate host. All ranks on a
    host share the host's network cable. Messages within a host do not use this cable, and `lines.within_host` predicts
    their time.
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


def choose_algorithms_by_size(lines: MessageTimeLines, names: Sequence[str], size: int, hosts: Hosts = ()) -> str:
    """Return the fastest algorithms by vector size, as a value of `launch.algorithm` such as `tree<65536<ring`.

    The choice changes from one size to the next only if another algorithm is faster by at least 1%. Among equally
    fast algorithms, the first one is chosen. All other ranks wait while rank 0 runs the simulation, so algorithms that
    take too long to simulate are excluded: ring and sharded_star for more than MAX_RANKS ranks, and two_level if ranks
    times hosts exceeds MAX_RANKS**2.
    """
    predicted: dict[str, list[float]] = {}
    for name in names:
        if is_cheap_to_simulate(name, size, hosts):
            algorithm = build_algorithm(name, size, hosts)
            if not algorithm.note:  # a note means that the algorithm was replaced by another one
                predicted[name] = predict_seconds_by_size(algorithm, lines, hosts)

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

    The number of moves is size * hosts for two_level, and size**2 for the ring and sharded_star. For all other
    algorithms, the number of moves grows more slowly.
    """
    hosts_or_ranks = len(set(hosts)) if name == "two_level" and hosts else size
    falls_back_to_ring = name == "halving_doubling" and size & (size - 1)
    is_quadratic = falls_back_to_ring or name in ("ring", "sharded_star", "two_level")
    return not is_quadratic or size * hosts_or_ranks <= MAX_RANKS**2


def predict_seconds_by_size(algorithm: Algorithm, lines: MessageTimeLines, hosts: Hosts) -> list[float]:
    """Return the predicted time of an all-reduce for each of VECTOR_SIZES, in seconds."""
    if sum(map(len, algorithm.moves)) <= MAX_MOVES:
        return [predict_seconds(algorithm, lines, nbytes, hosts) for nbytes in VECTOR_SIZES]
    first_seconds = predict_seconds(algorithm, lines, VECTOR_SIZES[0], hosts)
    last_seconds = predict_seconds(algorithm, lines, VECTOR_SIZES[-1], hosts)
    added_seconds = last_seconds - first_seconds
    added_bytes = VECTOR_SIZES[-1] - VECTOR_SIZES[0]
    return [first_seconds + added_seconds * (nbytes - VECTOR_SIZES[0]) / added_bytes for nbytes in VECTOR_SIZES]
