"""Measuring side by side: the sides of a comparison take turns, and each round gives one ratio.

A side is a task of this process, such as a command that is started and timed, or a function inside a team: processes
that were forked together, joined into one process group, and keep their number of threads. Only the side whose turn
it is computes; teams sleep at the end of a pipe meanwhile. The share of the machine that other programs used is
measured with every turn, and the speed of the machine before every round. Disturbed rounds stay in the record and do
not count where enough others are left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal

from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from configs.shared import Launch

NOISY = 0.1  # share of the machine used by others during a turn, above which its round is disturbed
SLACK = 0.03  # seconds: the resolution of /proc
ENOUGH = 5  # undisturbed rounds
PATIENCE = 600.0  # seconds for one turn
MAX_SLOWDOWN = 1.15  # of the calibration, compared with the fastest round, above which a round is disturbed
SUMMANDS = 4_000_000  # of the calibration: about 0.1 s
COPIED_BYTES = 128 * 2**20  # of the calibration: more than caches hold
Values = Mapping[str, float]
Side = Callable[[], float | Values]


@dataclasses.dataclass(frozen=True)
class Team:
    """Processes that measure together: in each, `sides(world)` gives the functions that can be called, by name.

    A side runs once per call, on all processes of its team at the same time, and returns seconds, or several numbers
    by name, such as `seconds`. Those of rank 0 count.
    """

    size: int
    threads: int
    sides: Callable[[World], Mapping[str, Side]]
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the processes. With cuda, each of them needs a GPU."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A side that this process runs itself.

    `run(number)` gets the number of the round and returns measured numbers, by name. Ratios use `seconds`. A returned
    `others` replaces the measured share of other programs.
    """

    name: str
    run: Callable[[int], Values]
    is_timed: bool = True
    """Whether tables show times of this side. The speed of the machine does not matter to other sides."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A median over rounds with the lowest and the highest value."""

    value: float
    low: float
    high: float


def summarize_values(values: Sequence[float]) -> Number:
    """Return the median of values, with the lowest and the highest one."""
    return Number(median(values), min(values), max(values))


@dataclasses.dataclass
class Samples:
    """The measured numbers: `values[side][name]` has one number per round.

    Every side has `seconds`, `cores` (how many it kept busy) and `others` (the share of the machine that other
    programs used meanwhile).
    """

    values: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    counted: bool = True
    """Whether rounds are added; False while warming up."""
    calibration: list[float] = dataclasses.field(default_factory=list)
    """Seconds of `time_calibration` before each round; empty in older records and without timed sides."""

    @classmethod
    def from_part(cls, part: Mapping[str, Any]) -> Samples:
        """Return the samples of a recorded part."""
        return cls(part["samples"], calibration=part.get("calibration", []))

    def add(self, side: str, measured: Values, before: Load) -> None:
        """Record a turn that began with `before` and has just ended."""
        now = Load.now()
        table = self.values.setdefault(side, {})
        if not self.counted:
            return
        cores = (now.family - before.family) / (now.time - before.time)
        numbers = {"cores": round(cores, 3), "others": now.compute_other_share(before), **measured}
        for name, number in numbers.items():
            table.setdefault(name, []).append(float(f"{number:.7g}"))

    @property
    def rounds(self) -> int:
        """Complete rounds."""
        counts = [len(columns.get("seconds", [])) for columns in self.values.values()]
        return min(counts, default=0)

    def clean(self) -> list[int]:
        """Return the undisturbed rounds."""
        shares = [columns.get("others", []) for columns in self.values.values()]
        slow_rounds = find_slow_rounds(self.calibration)
        rounds = []
        for number in range(self.rounds):
            highest = max(share[number] for share in shares)
            if highest <= NOISY and number not in slow_rounds:
                rounds.append(number)
        return rounds

    def list_counted(self, side: str, name: str = "seconds") -> list[float]:
        """Return the numbers of the rounds that count."""
        column = self.values[side][name]
        clean = self.clean()
        rounds = clean if len(clean) >= ENOUGH else range(self.rounds)
        return [column[number] for number in rounds]

    def number(self, side: str, name: str = "seconds", factor: float = 1.0) -> Number:
        """Return `factor` * a number of a side."""
        scaled = [factor * number for number in self.list_counted(side, name)]
        return summarize_values(scaled)

    def ratio(self, over: str, under: str, factor: float = 1.0, name: str = "seconds") -> Number:
        """Return `factor` * one side / another, round by round."""
        pairs = zip(self.list_counted(over, name), self.list_counted(under, name), strict=True)
        return summarize_values([factor * a / b for a, b in pairs])

    def ratio_of(self, side: str, over: str, under: str) -> Number:
        """Return one number of a side / another number of this side, round by round."""
        pairs = zip(self.list_counted(side, over), self.list_counted(side, under), strict=True)
        return summarize_values([a / b for a, b in pairs])

    def difference(self, side: str, other: str, name: str, factor: float = 1.0) -> Number:
        """Return `factor` * (one side - another), round by round."""
        pairs = zip(self.list_counted(side, name), self.list_counted(other, name), strict=True)
        return summarize_values([factor * (a - b) for a, b in pairs])


# ---- taking turns


class Pace:
    """The number of rounds, and the seconds that they may take.

    With `replaces_disturbed`, further rounds replace disturbed ones.
    """

    def __init__(self, rounds: int, drop: int, seconds: float, *, replaces_disturbed: bool = False) -> None:
        self.rounds = rounds
        self.drop = drop
        self.seconds = seconds
        self.replaces_disturbed = replaces_disturbed
        self.start = time.monotonic()
        self.last = 0.0  # seconds of the newest round

    def count_missing(self, samples: Samples) -> int:
        """Return how many further rounds are needed."""
        measured = len(samples.clean()) if self.replaces_disturbed else samples.rounds
        return max(0, self.rounds - measured)

    def allows(self, number: int, samples: Samples) -> bool:
        """Return whether another round is started after `number` rounds, warm-ups included.

        The first round that counts is always started, and later ones if they will end in time.
        """
        if not self.count_missing(samples):
            return False
        expected = time.monotonic() - self.start + self.last
        return number <= self.drop or expected <= self.seconds


def interleave(
    sides: Sequence[Team | Task], pace: Pace, keep: Callable[[Samples], None], earlier: Samples | None = None
) -> Samples:
    """Let all sides take turns, round by round; `keep` is called with the samples after each round that counts.

    The rounds are added to the `earlier` ones. Prints a line per round. Must be called before this process has computed
    anything with torch. Exits if a process of a team fails.
    """
    teams = [side for side in sides if isinstance(side, Team)]
    tasks = [side for side in sides if isinstance(side, Task)]
    seats: list[tuple[Team, int]] = []
    for team in teams:
        seats += [(team, rank) for rank in range(team.size)]
    pipes = [Pipe() for _ in seats]
    samples = earlier or Samples()

    def body(place: RankInfo) -> None:
        team, rank = seats[place.rank]
        for number, (ours, theirs) in enumerate(pipes):
            ours.close()
            if number != place.rank:
                theirs.close()
        local_launcher.redirect_output(Path(os.devnull), keep_stdout=False)
        store = f"{place.master}-{teams.index(team)}"
        seat = RankInfo(rank, team.size, rank, team.size, master=store)
        with rendezvous.join_world(seat, Launch(device=team.device, threads=team.threads)) as world:
            serve(team.sides(world), pipes[place.rank][1])

    def meanwhile() -> None:
        for _, theirs in pipes:
            theirs.close()
        members = []
        for team in teams:
            members.append([pipe for (pipe, _), seat in zip(pipes, seats, strict=True) if seat[0] is team])
        with contextlib.suppress(EOFError, BrokenPipeError):  # a process has ended, and fork_all reports why
            direct(members, tasks, samples, pace, keep)

    if not teams:
        direct([], tasks, samples, pace, keep)
        return samples
    status = local_launcher.run_ranks(body, len(seats), 1, meanwhile)
    if status:
        sys.exit(status)
    return samples


def direct(
    members: Sequence[Sequence[Connection]],
    tasks: Sequence[Task],
    samples: Samples,
    pace: Pace,
    keep: Callable[[Samples], None],
) -> None:
    """Give the turns; `members` are the pipes to each team's processes."""
    turns = [(task.name, task.run) for task in tasks]
    for team in members:
        turns += [(side, call_team(team, side)) for side in hear_all(team)[0]]
    if samples.values.keys() != {name for name, _ in turns}:
        samples.values.clear()  # earlier rounds compared other sides
        samples.calibration.clear()
    is_timed = bool(members) or any(task.is_timed for task in tasks)
    number = 0
    while pace.allows(number, samples):
        start = time.monotonic()
        samples.counted = number >= pace.drop
        print(f"  {describe_round(pace, samples)}:", end="", flush=True)
        if samples.counted and is_timed:
            samples.calibration.append(round(time_calibration(), 6))
        take_turns(turns, pace.drop + samples.rounds if samples.counted else number, samples)
        pace.last = time.monotonic() - start
        print(f"  ({pace.last:.0f} s)", flush=True)
        if samples.counted:
            keep(samples)
        number += 1
    for team in members:
        for pipe in team:
            pipe.send(None)


def describe_round(pace: Pace, samples: Samples) -> str:
    """Return the title of the next round."""
    if not samples.counted:
        return "warm-up"
    number = samples.rounds + 1
    return f"round {number} of {pace.rounds}" if number <= pace.rounds else f"round {number} replaces a disturbed one"


def take_turns(turns: Sequence[tuple[str, Callable[[int], Values]]], number: int, samples: Samples) -> None:
    """Run each side once.

    Each round starts with another side, because a side after a pause may have to wait for the disk.
    """
    first = number % len(turns)
    for name, run in [*turns[first:], *turns[:first]]:
        before = Load.now()
        measured = run(number)
        samples.add(name, measured, before)
        print(f"  {name} {measured['seconds']:.4g} s", end="", flush=True)


def call_team(team: Sequence[Connection], side: str) -> Callable[[int], Values]:
    """Return the function that lets a team run a side."""

    def run(number: int) -> Values:
        for pipe in team:
            pipe.send(side)
        measured = hear_all(team)[0]
        return measured if isinstance(measured, Mapping) else {"seconds": measured}

    return run


def hear_all(team: Sequence[Connection]) -> list[Any]:
    """Return the answer of each process of a team. Raises TimeoutError."""
    for pipe in team:
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE:.0f} s")
    return [pipe.recv() for pipe in team]


def serve(sides: Mapping[str, Side], pipe: Connection) -> None:
    """Run the requested sides, in a process of a team."""
    pipe.send(list(sides))
    while (name := pipe.recv()) is not None:
        pipe.send(sides[name]())


# ---- the speed of the machine, and who else uses it


def time_calibration() -> float:
    """Return the seconds of a fixed amount of arithmetic and copying on one thread."""
    buffer = memoryview(bytearray(b"1") * (2 * COPIED_BYTES))  # written, because untouched pages occupy no memory
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        sum(range(SUMMANDS))
        buffer[:COPIED_BYTES] = buffer[COPIED_BYTES:]
        seconds.append(time.perf_counter() - start)
    return median(seconds)  # a single pause of this process does not mean that the machine is slow


def find_slow_rounds(calibration: Sequence[float]) -> set[int]:
    """Return the rounds before which the calibration took much longer than before the fastest round."""
    limit = MAX_SLOWDOWN * min(calibration, default=0.0)
    return {number for number, seconds in enumerate(calibration) if seconds > limit}


@dataclasses.dataclass(frozen=True)
class Load:
    """CPU seconds used so far, by the whole machine and by this process with all its descendants.

    The machine's seconds do not include interrupts, because the kernel does not attribute them to processes. The
    benchmark's own messages cause many interrupts.
    """

    time: float
    machine: float
    family: float

    @classmethod
    def now(cls, *roots: int) -> Load:
        """Return the present load. The processes with the pids `roots`, and their descendants, count as family."""
        ticks = os.sysconf("SC_CLK_TCK")
        fields = Path("/proc/stat").read_text().split()[1:11]
        user, nice, system, _, _, _, _, steal, *_ = map(int, fields)
        machine = (user + nice + system + steal) / ticks
        return cls(time.perf_counter(), machine, count_family_ticks(*roots) / ticks)

    def compute_other_share(self, before: Load) -> float:
        """Return the share of the machine that other programs have used since `before`."""
        wall = self.time - before.time
        busy = self.family - before.family
        busy_elsewhere = self.machine - before.machine - busy - SLACK
        return round(max(0.0, busy_elsewhere) / (wall * (os.cpu_count() or 1)), 3)


def count_family_ticks(*roots: int) -> int:
    """Return the CPU time of this process, `roots`, their descendants, and those that have been waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))

    family = {os.getpid(), *roots}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(ticks.get(pid, 0) for pid in family)


def require_same(label: str, losses: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Raise AssertionError unless two trainings had equal results: times of different work are not comparable."""
    pairs = zip(losses, expected, strict=True)
    worst = max(abs(a - b) / max(abs(b), 1e-2) for a, b in pairs)
    if not worst <= tolerance:
        raise AssertionError(f"{label}: results differ by {worst:.1e}, allowed {tolerance:.0e}")
