"""An all-reduce as data, the moves of each rank in order, and a simulation in which the ranks make them.

The vector is divided into chunks of nearly equal length (`find_chunk`). A move is one of

    send     chunk peer    send the chunk as it is now to the peer; never waits
    receive  chunk peer    wait for the next message from the peer, and overwrite the chunk with it
    add      chunk peer    wait for the next message from the peer, and add it to the chunk (or what the reduction is)

and may concern several chunks from that one on, as one message. Messages from one rank to another arrive in order. At
the end every rank holds the sum over all ranks in every chunk. Imports no torch.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from common.core.errors import UserError


class Move(NamedTuple):
    """One move of a rank: send, receive or add `chunks` chunks from number `chunk` on as one message."""

    kind: Literal["send", "receive", "add"]
    chunk: int
    peer: int
    chunks: int = 1

    def __str__(self) -> str:
        last = self.chunk + self.chunks - 1
        what = f"chunk {self.chunk}" if self.chunks == 1 else f"chunks {self.chunk}-{last}"
        return f"{self.kind} {what} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce: its name, into how many chunks it divides a vector, and the moves of each rank in order.

    `note` is a sentence for the user where another algorithm was asked for.
    """

    name: str
    chunks: int
    moves: tuple[tuple[Move, ...], ...]
    note: str = ""


def find_chunk(length: int, chunks: int, chunk: int, count: int = 1) -> tuple[int, int]:
    """Return begin and end of `count` chunks from number `chunk` on, in a vector of `length` elements.

    Chunks differ by at most one element; where there are fewer elements than chunks, some are empty.
    """
    return length * chunk // chunks, length * (chunk + count) // chunks


def describe_move(algorithm: Algorithm, rank: int, position: int) -> str:
    """Return a move for a message, as `rank 1, move 0 (add chunk 0 from rank 2)`; ranks and moves count from 0."""
    return f"rank {rank}, move {position} ({algorithm.moves[rank][position]})"


class Event(NamedTuple):
    """A move that a rank has made.

    `time` is when a message was issued (send) or had arrived (receive, add), and `sent_by` the number of the event
    that sent it, None for a send.
    """

    rank: int
    position: int
    move: Move
    time: float
    sent_by: int | None


class Route(NamedTuple):
    """The way of a message: the cable that it leaves by, the one that it comes in by, and its time on both."""

    outgoing: Hashable
    incoming: Hashable
    duration: float


def route_in_one_step(source: int, target: int, move: Move) -> Route:
    """Return the route of a message through the cables of its two ranks, in one unit of time."""
    return Route(source, target, 1.0)


class Parcel(NamedTuple):
    """A message that waits for its cables; the oldest comes first."""

    issued: float
    number: int  # of the event that sent it
    source: int
    target: int
    route: Route


def simulate_algorithm(
    algorithm: Algorithm, find_route: Callable[[int, int, Move], Route] = route_in_one_step
) -> list[Event]:
    """Return all moves in an order in which they can be made, with their times on a clock.

    A cable carries one message at a time in each direction, and a message has both of its cables for its whole
    duration; what a rank sends through one cable leaves in order, and computing takes no time. Without `find_route`
    time counts steps, in each of which a rank sends one message at most and gets one at most. Raises UserError,
    naming rank and move, where a rank waits for ever.
    """
    simulation = _Simulation(algorithm, find_route)
    for rank in range(len(algorithm.moves)):
        simulation.run_rank(rank)
    while (target := simulation.carry_message()) is not None:
        simulation.run_rank(target)
    simulation.check_end()
    return simulation.events


class _Simulation:
    """State of a simulation: positions and clocks of the ranks, messages under way, and when cables are free."""

    def __init__(self, algorithm: Algorithm, find_route: Callable[[int, int, Move], Route]) -> None:
        self.algorithm, self.find_route = algorithm, find_route
        self.events: list[Event] = []
        self.positions = [0] * len(algorithm.moves)
        self.clocks = [0.0] * len(algorithm.moves)
        self.waiting: dict[tuple[int, Hashable], deque[Parcel]] = defaultdict(deque)  # of a rank, for an outgoing cable
        self.arrived: dict[tuple[int, int], deque[tuple[float, int]]] = defaultdict(deque)  # by source and target
        self.heads: list[tuple[float, float, int, tuple[int, Hashable]]] = []  # a heap: start, issued, number, queue
        self.outgoing_free: dict[Hashable, float] = defaultdict(float)
        self.incoming_free: dict[Hashable, float] = defaultdict(float)

    def run_rank(self, rank: int) -> None:
        """Make the moves of a rank up to one that waits for a message."""
        moves = self.algorithm.moves[rank]
        while self.positions[rank] < len(moves):
            move, time = moves[self.positions[rank]], self.clocks[rank]
            sent_by: int | None = None
            if move.kind == "send":
                route = self.find_route(rank, move.peer, move)
                queue = self.waiting[rank, route.outgoing]
                queue.append(Parcel(time, len(self.events), rank, move.peer, route))
                if len(queue) == 1:
                    self.push_head(rank, route.outgoing)
            elif messages := self.arrived[move.peer, rank]:
                time, sent_by = messages.popleft()
                self.clocks[rank] = max(self.clocks[rank], time)
            else:
                return
            self.events.append(Event(rank, self.positions[rank], move, time, sent_by))
            self.positions[rank] += 1

    def carry_message(self) -> int | None:
        """Carry the message that can leave first, and return its target; None if there is none."""
        while self.heads:
            start, _, _, key = heapq.heappop(self.heads)
            _, number, source, target, route = self.waiting[key][0]
            if self.find_start(self.waiting[key][0]) > start:  # other messages have taken its cables meanwhile
                self.push_head(*key)
                continue
            self.waiting[key].popleft()
            end = start + route.duration
            self.outgoing_free[route.outgoing] = self.incoming_free[route.incoming] = end
            self.arrived[source, target].append((end, number))
            if self.waiting[key]:
                self.push_head(*key)
            return target
        return None

    def push_head(self, rank: int, outgoing: Hashable) -> None:
        """Let the oldest message of a queue wait for its start, which can only become later."""
        parcel = self.waiting[rank, outgoing][0]
        heapq.heappush(self.heads, (self.find_start(parcel), parcel.issued, parcel.number, (rank, outgoing)))

    def find_start(self, parcel: Parcel) -> float:
        """Return when a message can leave: once it was issued and both cables are free."""
        route = parcel.route
        return max(parcel.issued, self.outgoing_free[route.outgoing], self.incoming_free[route.incoming])

    def check_end(self) -> None:
        """Raise UserError if a rank still waits."""
        plan = self.algorithm.moves
        stuck = {rank: moves[at] for rank, moves in enumerate(plan) if (at := self.positions[rank]) < len(moves)}
        for rank, move in stuck.items():
            if self.find_next_send(move.peer, rank) is None:
                where = describe_move(self.algorithm, rank, self.positions[rank])
                raise UserError(f"{where} waits for ever: rank {move.peer} sends it no further message")
        if stuck:
            self.raise_deadlock({rank: move.peer for rank, move in stuck.items()})

    def find_next_send(self, source: int, target: int) -> int | None:
        """Return the position of the next message that a rank would send to another one."""
        moves = self.algorithm.moves[source]
        later = range(self.positions[source], len(moves))
        return next((at for at in later if moves[at].kind == "send" and moves[at].peer == target), None)

    def raise_deadlock(self, waits_for: dict[int, int]) -> NoReturn:
        """Raise UserError that names a circle of ranks each of which waits for the next one."""
        path = [min(waits_for)]
        while (after := waits_for[path[-1]]) not in path:
            path.append(after)
        circle = path[path.index(after) :]
        rank, peer = circle[0], waits_for[circle[0]]
        where = describe_move(self.algorithm, rank, self.positions[rank])
        its = describe_move(self.algorithm, peer, self.positions[peer])
        around = " for ".join(f"rank {one}" for one in [*circle, rank])
        raise UserError(
            f"deadlock: {where} waits for what rank {peer} sends at its move {self.find_next_send(peer, rank)}, but "
            f"{its} comes first and waits too ({around})"
        )
