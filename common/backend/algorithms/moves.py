"""Represent an all-reduce algorithm as an ordered list of moves for each rank, and simulate the algorithm.

The vector is divided into chunks of nearly equal length (see `compute_chunk_bounds`). Each move is one of the
following:

    send     chunk peer    send the current values of the chunk to the peer, without waiting
    receive  chunk peer    wait for the next message from the peer and overwrite the chunk with it
    add      chunk peer    wait for the next message from the peer and add it to the chunk (or apply another reduction)

A move may send several consecutive chunks as one message. Messages from one rank to another arrive in the order in
which they were sent. When all moves are complete, every chunk on every rank contains the sum over all ranks. This
module does not import torch.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from common.system.errors import UserError


class Move(NamedTuple):
    """A move of one rank, which sends, receives or adds one or more chunks.

    The message contains `chunks` consecutive chunks, starting at number `chunk`.
    """

    kind: Literal["send", "receive", "add"]
    chunk: int
    peer: int
    chunks: int = 1

    def __str__(self) -> str:
        last = self.chunk + self.chunks - 1
        chunks = f"chunk {self.chunk}" if self.chunks == 1 else f"chunks {self.chunk}-{last}"
        preposition = "to" if self.kind == "send" else "from"
        return f"{self.kind} {chunks} {preposition} rank {self.peer}"


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm: its name, the number of chunks, and the moves of each rank.

    `note` is a message for the user if this algorithm replaces the requested one; otherwise, it is empty.
    """

    name: str
    chunks: int
    moves: tuple[tuple[Move, ...], ...]
    note: str = ""


def compute_chunk_bounds(length: int, chunks: int, chunk: int, count: int = 1) -> tuple[int, int]:
    """Return the start and end positions of `count` chunks, starting at chunk number `chunk`.

    The end position is exclusive. `length` is the number of elements of the vector, and `chunks` is the total number
    of chunks. The lengths of chunks differ by at most one element. If there are fewer elements than chunks, some chunks
    are empty.
    """
    return length * chunk // chunks, length * (chunk + count) // chunks


def describe_move(algorithm: Algorithm, rank: int, position: int) -> str:
    """Return a description of a move, such as `rank 1, move 0 (add chunk 0 from rank 2)`."""
    return f"rank {rank}, move {position} ({algorithm.moves[rank][position]})"


class CompletedMove(NamedTuple):
    """A completed move of one rank in a simulation.

    `time` is the simulated time at which the message was sent (send) or had arrived (receive, add). `sent_by` is the
    index of the event that sent the received message; None if the move is a send.
    """

    rank: int
    position: int
    move: Move
    time: float
    sent_by: int | None

    def __str__(self) -> str:
        return f"rank {self.rank}, move {self.position} ({self.move})"


class CableRoute(NamedTuple):
    """Cables that a message occupies (outgoing at the source, incoming at the target), and the message's duration."""

    outgoing: Hashable
    incoming: Hashable
    duration: float


RouteFinder = Callable[[int, int, Move], CableRoute]


def make_one_step_route(source: int, target: int, move: Move) -> CableRoute:
    """Return a route that uses one cable of each rank and takes one unit of time."""
    return CableRoute(source, target, 1.0)


class QueuedMessage(NamedTuple):
    """A message that waits until both of its cables are free."""

    issued: float
    event: int
    """Index of the event that sent the message."""
    source: int
    target: int
    route: CableRoute


def simulate_algorithm(algorithm: Algorithm, find_route: RouteFinder = make_one_step_route) -> list[CompletedMove]:
    """Return all moves in an executable order, with their simulated times.

    A cable carries one message at a time in each direction. A message occupies the cable of its source and the cable of
    its target for its whole duration. Messages of the same rank leave a cable in the order in which they were sent.
    Computation takes no time. Without `find_route`, the unit of time is a step, and in each step a rank sends at most
    one message and receives at most one message. Raises UserError if a rank would wait forever. The error message names
    the rank and the move.
    """
    simulation = _Simulation(algorithm, find_route)
    for rank in range(len(algorithm.moves)):
        simulation.execute_moves(rank)
    while (target := simulation.deliver_message()) is not None:
        simulation.execute_moves(target)
    simulation.check_all_moves_executed()
    return simulation.events


class _Simulation:
    """State of a simulation: ranks, messages in flight and cables."""

    def __init__(self, algorithm: Algorithm, find_route: RouteFinder) -> None:
        self.algorithm = algorithm
        self.find_route = find_route
        self.events: list[CompletedMove] = []
        self.positions = [0] * len(algorithm.moves)
        self.clocks = [0.0] * len(algorithm.moves)
        # messages that wait for a cable, by rank and outgoing cable
        self.queues: dict[tuple[int, Hashable], deque[QueuedMessage]] = defaultdict(deque)
        # arrival time and event of messages that no move has received yet, by source and target
        self.arrived: dict[tuple[int, int], deque[tuple[float, int]]] = defaultdict(deque)
        # a heap with the first message of each queue: start time, time of sending, event, key of the queue
        self.heads: list[tuple[float, float, int, tuple[int, Hashable]]] = []
        self.outgoing_free: dict[Hashable, float] = defaultdict(float)
        self.incoming_free: dict[Hashable, float] = defaultdict(float)

    def execute_moves(self, rank: int) -> None:
        """Execute the moves of a rank until a move must wait for a message that has not arrived."""
        moves = self.algorithm.moves[rank]
        while self.positions[rank] < len(moves):
            position = self.positions[rank]
            move = moves[position]
            time = self.clocks[rank]
            sent_by: int | None = None
            if move.kind == "send":
                self.queue_message(rank, move, time)
            elif messages := self.arrived[move.peer, rank]:
                time, sent_by = messages.popleft()
                self.clocks[rank] = max(self.clocks[rank], time)
            else:
                return
            self.events.append(CompletedMove(rank, position, move, time, sent_by))
            self.positions[rank] += 1

    def queue_message(self, rank: int, move: Move, time: float) -> None:
        """Append a message to the queue of its outgoing cable."""
        route = self.find_route(rank, move.peer, move)
        queue = self.queues[rank, route.outgoing]
        queue.append(QueuedMessage(time, len(self.events), rank, move.peer, route))
        if len(queue) == 1:
            self.push_first_message((rank, route.outgoing))

    def deliver_message(self) -> int | None:
        """Deliver the message that can start first and return its target.

        Return None if no message is waiting.
        """
        while self.heads:
            start, _, _, key = heapq.heappop(self.heads)
            queue = self.queues[key]
            message = queue[0]
            if self.compute_start_time(message) > start:  # other messages have used the cables in the meantime
                self.push_first_message(key)
                continue
            queue.popleft()
            end = start + message.route.duration
            self.outgoing_free[message.route.outgoing] = end
            self.incoming_free[message.route.incoming] = end
            self.arrived[message.source, message.target].append((end, message.event))
            if queue:
                self.push_first_message(key)
            return message.target
        return None

    def push_first_message(self, key: tuple[int, Hashable]) -> None:
        """Push the first message of a queue onto the heap, with its earliest start time."""
        message = self.queues[key][0]
        heapq.heappush(self.heads, (self.compute_start_time(message), message.issued, message.event, key))

    def compute_start_time(self, message: QueuedMessage) -> float:
        """Return the earliest time at which a message can start, which is when both of its cables are free."""
        route = message.route
        return max(message.issued, self.outgoing_free[route.outgoing], self.incoming_free[route.incoming])

    def check_all_moves_executed(self) -> None:
        """Raise UserError if a rank has not executed all of its moves."""
        waits_for = {}
        for rank, moves in enumerate(self.algorithm.moves):
            position = self.positions[rank]
            if position < len(moves):
                waits_for[rank] = moves[position].peer
        for rank, peer in waits_for.items():
            if self.find_next_send_position(peer, rank) is None:
                move = describe_move(self.algorithm, rank, self.positions[rank])
                raise UserError(f"{move} waits forever, because rank {peer} sends no further message to rank {rank}")
        if waits_for:
            self.raise_deadlock_error(waits_for)

    def find_next_send_position(self, source: int, target: int) -> int | None:
        """Return the position of the next send from `source` to `target`, or None if there is no such send."""
        moves = self.algorithm.moves[source]
        for position in range(self.positions[source], len(moves)):
            if moves[position].kind == "send" and moves[position].peer == target:
                return position
        return None

    def raise_deadlock_error(self, waits_for: dict[int, int]) -> NoReturn:
        """Raise a UserError that names a cycle of ranks in which each rank waits for the next one."""
        path = [min(waits_for)]
        while (following := waits_for[path[-1]]) not in path:
            path.append(following)
        cycle = path[path.index(following) :]
        rank = cycle[0]
        peer = waits_for[rank]
        move = describe_move(self.algorithm, rank, self.positions[rank])
        blocking_move = describe_move(self.algorithm, peer, self.positions[peer])
        ranks = " -> ".join(f"rank {member}" for member in [*cycle, rank])
        raise UserError(
            f"deadlock: {move} waits for the message that rank {peer} sends in move "
            f"{self.find_next_send_position(peer, rank)}, but {blocking_move} comes first and is also waiting "
            f"(cycle: {ranks})"
        )
