"""Measuring side by side: who is compared takes turns, and what is reported is the median of per-round ratios.

Sides live in teams: processes that were forked together, joined into one world of their own, and keep their
number of threads. Only the team whose turn it is computes; the others sleep at the end of a pipe. The share of
the machine that somebody else used meanwhile is measured with every turn; disturbed rounds are repeated and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from common.distributed import local_launcher, rendezvous
from common.distributed.rendezvous import Place, World
from common.runs import provenance
from common.training.entry_point import redirect
from configs.shared import Launch

NOISY = 0.1  # share of the machine used by others during a turn, above which its round is left out
SLACK = 0.03  # seconds: what /proc cannot resolve
ENOUGH = 3  # undisturbed rounds
PATIENCE = 600.0  # seconds for one turn; a busy machine is no reason to fail
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "lightning", "accelerate", "wandb")
ALLOCATOR = ("MALLOC_", "OMP_", "MKL_", "GOMP_", "KMP_", "LD_PRELOAD")
Side = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Team:
    """Processes that measure together: in each, `sides(world)` gives what can be run there, by name.

    A side runs once per call, on all processes of its team at the same time, and returns seconds; rank 0's count.
    """

    size: int
    threads: int
    sides: Callable[[World], dict[str, Side]]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of per-round ratios and their range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}..{self.high:.2f}]"


@dataclasses.dataclass
class Samples:
    """What was taken down, round by round: seconds, cores used, and the share of the machine that others used.

    Rounds that others disturbed stay in the record but do not count, unless fewer than `ENOUGH` are left.
    """

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    cores: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    foreign: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, side: str, seconds: float, before: Load) -> None:
        """Take down a turn that began with `before` and has just ended."""
        now = Load.now()
        wall, own = now.time - before.time, now.own - before.own
        others = max(0.0, now.machine - before.machine - own - SLACK) / (wall * (os.cpu_count() or 1))
        for table, value in ((self.seconds, seconds), (self.cores, own / wall), (self.foreign, others)):
            table.setdefault(side, []).append(value)

    def clean(self) -> list[int]:
        """The rounds in which others left the machine alone."""
        worst = [max(shares) for shares in zip(*self.foreign.values(), strict=True)]
        return [number for number, share in enumerate(worst) if share <= NOISY]

    def kept(self, side: str) -> list[float]:
        clean, every = self.clean(), self.seconds[side]
        return [every[number] for number in clean] if len(clean) >= ENOUGH else every

    def median(self, side: str) -> float:
        return median(self.kept(side))

    def ratio(self, over: str, under: str, factor: float = 1.0) -> Ratio:
        """`factor` * seconds of one side / seconds of another, round by round."""
        values = [factor * a / b for a, b in zip(self.kept(over), self.kept(under), strict=True)]
        return Ratio(median(values), min(values), max(values))

    @property
    def rounds(self) -> str:
        """How many rounds count, and a warning if others disturbed too many."""
        clean, total = len(self.clean()), len(next(iter(self.seconds.values())))
        if clean < ENOUGH:
            return f"NOISY: others used the machine in {total - clean} of {total} rounds, all of which count"
        return f"{clean} rounds" + (f", {total - clean} disturbed by others left out" if clean < total else "")


# ---- taking turns


def interleave(teams: Sequence[Team], *, rounds: int, drop: int = 1) -> Samples:
    """Run all sides of all teams in turn: `drop` rounds for warming up, then `rounds` undisturbed ones, if half are.

    Must be called before this process has computed anything with torch. Exits if a process fails.
    """
    seats = [(team, rank) for team in teams for rank in range(team.size)]
    pipes = [Pipe() for _ in seats]
    samples = Samples()

    def body(place: Place) -> None:
        team, rank = seats[place.rank]
        for number, (ours, theirs) in enumerate(pipes):
            ours.close()
            if number != place.rank:
                theirs.close()
        redirect(Path(os.devnull), keep_stdout=False)
        store = f"{place.master}-{teams.index(team)}"
        seat = Place(rank, team.size, rank, team.size, master=store)
        with rendezvous.group(seat, Launch(device="cpu", threads=team.threads)) as world:
            serve(team.sides(world), pipes[place.rank][1])

    def meanwhile() -> None:
        for _, theirs in pipes:
            theirs.close()
        members = [[pipes[i][0] for i, seat in enumerate(seats) if seat[0] is team] for team in teams]
        with contextlib.suppress(EOFError, BrokenPipeError):  # a process has ended, and fork_all tells why
            direct(members, samples, rounds, drop)

    status = local_launcher.fork_all(body, len(seats), 1, meanwhile)
    if status:
        sys.exit(status)
    return samples


def direct(members: Sequence[Sequence[Connection]], samples: Samples, rounds: int, drop: int) -> None:
    """Give the turns; `members` are the pipes to each team's processes."""
    turns = [(team, side) for team in members for side in hear_all(team)[0]]
    for number in range(drop + 2 * rounds):
        if number > drop and len(samples.clean()) == rounds:
            break
        first = number % len(turns)  # another one each round: who comes after a pause may have to wait for the disk
        for team, side in turns[first:] + turns[:first]:
            before = Load.now()
            for pipe in team:
                pipe.send(side)
            seconds = hear_all(team)[0]
            if number >= drop:
                samples.add(side, seconds, before)
    for team in members:
        for pipe in team:
            pipe.send(None)


def hear_all(team: Sequence[Connection]) -> list[Any]:
    """The answer of each process of a team."""
    for pipe in team:
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE:.0f} s")
    return [pipe.recv() for pipe in team]


def serve(sides: Mapping[str, Side], pipe: Connection) -> None:
    """A process's part: run the sides that are called."""
    pipe.send(list(sides))
    while (name := pipe.recv()) is not None:
        pipe.send(sides[name]())


# ---- who else uses the machine


@dataclasses.dataclass(frozen=True)
class Load:
    """CPU seconds used so far, by the whole machine and by this process with all its descendants."""

    time: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> Load:
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        machine = (user + nice + system + irq + softirq + steal) / ticks
        return cls(time.perf_counter(), machine, own_ticks() / ticks)


def own_ticks() -> int:
    """CPU time of this process, its descendants, and those of them that have been waited for."""
    table: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        table[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while grown := {pid for pid, (parent, _) in table.items() if parent in family} - family:
        family |= grown
    return sum(table[pid][1] for pid in family if pid in table)


# ---- what is shown and kept


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report. `met` says whether a goal was reached; None where there is none."""

    what: str
    measured: str
    goal: str = ""
    met: bool | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        return "" if self.met is None else "met" if self.met else "MISSED"


def at_least(what: str, ratio: Ratio, goal: float, note: str = "") -> Row:
    return Row(what, str(ratio), f">= {goal:g}", ratio.median >= goal, note)


def at_most(what: str, ratio: Ratio, goal: float, note: str = "") -> Row:
    return Row(what, str(ratio), f"<= {goal:g}", ratio.median <= goal, note)


class Report:
    """Prints section by section and keeps everything, raw samples included, in one JSON file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.file = folder / f"{name}-{provenance.now().replace(':', '')}.json"
        self.content: dict[str, Any] = {
            "benchmark": name,
            "date": provenance.now(),
            "command": sys.argv,
            "machine": {"cpu": provenance.cpu_model(), "cores": len(os.sched_getaffinity(0))},
            "versions": {package: provenance.version(package) for package in PACKAGES},
            "commit": (provenance.git("rev-parse", "HEAD") or "").strip() or None,
            "environment": {k: v for k, v in os.environ.items() if k.startswith(ALLOCATOR)},
            "sections": {},
        }
        machine = self.content["machine"]
        print(f"{machine['cpu']}, {machine['cores']} cores, torch {self.content['versions']['torch']}")
        print("medians of per-round ratios [smallest..largest]; sides take turns")

    def section(self, title: str, rows: Sequence[Row], samples: Mapping[str, Samples], **facts: Any) -> None:
        """Print rows and save them with their raw samples."""
        print(f"\n{title}")
        widths = [max((len(text) for text in column), default=0) for column in zip(*map(cells, rows), strict=True)]
        for row in rows:
            print("  " + "  ".join(f"{t:<{w}}" for t, w in zip(cells(row), widths, strict=True)).rstrip(), flush=True)
        if len(samples) == 1:
            print("  " + next(iter(samples.values())).rounds, flush=True)
        raw = {name: dataclasses.asdict(taken) for name, taken in samples.items()}
        shown = [dataclasses.asdict(row) for row in rows]
        self.content["sections"][title] = {"rows": shown, "samples": raw} | facts
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.content, indent=1))


def cells(row: Row) -> tuple[str, ...]:
    return row.what, row.measured, row.goal, row.verdict, row.note
