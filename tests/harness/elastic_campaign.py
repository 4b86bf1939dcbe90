"""Elastic runs whose ranks are killed, stopped and continued at random moments around joins.

    python -m tests.harness.elastic_campaign --cases=200 [--first=K] [--seed=S]      about ten seconds a case
    python -m tests.cluster.elastic_campaign --cases=30                              about a minute a case

Each case strikes two or three times: a rank first, then, mostly once its new process has appeared, that process or
another rank. A run that ends well must have the numbers of one process. A run may end early only where no rank with the
state is left or a rank that serves a shard is lost; then it is resumed and must have the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common.checkpoint import storage
from common.runs.folder import RunFolder
from common.techniques.elastic.coordinator import EndReason
from common.techniques.elastic.member import STUCK_REASON
from tests.harness import warm
from tests.harness.chance import draw_seed
from tests.harness.elastic_runs import SMALL, differences
from tests.harness.long_runs import ranks_of
from tests.harness.processes import environment, processes_of, run
from tests.harness.registry import BY_NAME, EXPERIMENTS
from tests.harness.resuming import resume
from tests.harness.warm import Command

PATIENCE = 60.0  # seconds for a run that takes about six
SETUP = "launch.setup_timeout=20"  # also of a new process that does not come
SETTINGS = {entry.name: entry.elastic_campaign for entry in EXPERIMENTS if entry.elastic_campaign is not None}
HOWS = ("kill", "stop", "blink")


@dataclasses.dataclass(frozen=True)
class Pace:
    """Length of the runs of a campaign. An epoch has 10 steps, and a step takes 20 ms."""

    steps: int
    saves: int
    """Steps between two checkpoints."""
    timeout: float
    """elastic.timeout; a process stands still for at most two and a half times as long."""
    latest: int
    """Step after which the first strike comes at the latest."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a run, elastic or not."""
        return f"steps={self.steps}", f"epochs={self.steps // 10}", f"checkpoint.every_steps={self.saves}"


LONG = Pace(steps=200, saves=20, timeout=1.0, latest=60)
SHORT = Pace(steps=60, saves=10, timeout=0.5, latest=12)


@dataclasses.dataclass
class Strike:
    """One fault: what is done to which process, and when."""

    how: str
    """kill, stop (for ever) or blink (continued after `pause`)."""
    newcomer: bool
    """Whether it is aimed at the newest process of a rank."""
    waits: bool
    """Whether it waits for a new process to appear."""
    pick: float
    """Chooses among the other ranks, from 0 to 1."""
    delay: float
    pause: float

    def __str__(self) -> str:
        length = f" {self.pause:.2f} s" if self.how == "blink" else ""
        target = "new process" if self.newcomer else f"rank at {self.pick:.2f}"
        return f"{'join' if self.waits else 'then'} + {self.delay:.2f} s: {self.how}{length} {target}"


@dataclasses.dataclass
class Case:
    """A run with its strikes, and what became of it."""

    number: int
    name: str
    ranks: int
    begin: int
    """Step after which the first strike comes."""
    strikes: list[Strike]
    struck: list[str] = dataclasses.field(default_factory=list)
    outcome: str = ""
    problem: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """Describe the case and its outcome in a line."""
        plan = f"{self.number:3} {self.name} on {self.ranks}, step {self.begin}, {'; '.join(map(str, self.strikes))}"
        done = f"struck {', '.join(self.struck) or 'nothing'}"
        return f"{plan}: {done}: {self.problem or self.outcome} ({self.seconds:.1f} s)"


def draw_case(seed: str, number: int, pace: Pace = LONG) -> Case:
    """Draw the case of a number."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(sorted(SETTINGS))
    longest = 2.5 * pace.timeout
    strikes = [Strike(chance.choice(HOWS), False, False, chance.random(), 0.0, chance.uniform(0.1, longest))]
    for _ in range(chance.choice((1, 2))):
        strikes.append(
            Strike(
                how=chance.choice(HOWS),
                newcomer=chance.random() < 0.5,
                waits=chance.random() < 0.8,
                pick=chance.random(),
                delay=chance.uniform(0, 0.8),
                pause=chance.uniform(0.1, longest),
            )
        )
    return Case(number, name, chance.choice((2, 3, 4)), chance.randint(5, pace.latest), strikes)


class Target:
    """The processes of a run that is struck."""

    newcomer_seconds = 4.0  # to wait for the new process of a rank

    def __init__(self, process: Command, runs: Path) -> None:
        self.process, self.runs = process, runs
        self.initial = list[int]()
        self.seen = set[int]()
        self.newest = 0
        self.struck_first: set[int] = set()
        """Ranks whose first process was struck."""

    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.process.poll() is not None

    def note_first_processes(self) -> None:
        """Note the processes with which the run has begun."""
        self.initial = self.list_ranks()
        self.seen = set(self.initial)

    def wait_for_step(self, step: int) -> bool:
        """Wait until a step is logged; False where the run ends before."""
        while not self.has_ended():
            for file in self.runs.glob("*/attempts/0001/metrics.jsonl"):
                if len(file.read_bytes().splitlines()) > step:
                    self.note_first_processes()
                    return True
            time.sleep(0.02)
        return False

    def wait_for_newcomer(self) -> None:
        """Wait for the new process of a rank, for a while."""
        deadline = time.monotonic() + self.newcomer_seconds
        while time.monotonic() < deadline and not self.has_ended() and not self.find_new():
            time.sleep(0.005)

    def find_new(self) -> bool:
        """Look for a new process."""
        new = [pid for pid in self.list_ranks() if pid not in self.seen]
        self.seen.update(new)
        self.newest = new[-1] if new else self.newest
        return bool(new)

    def list_ranks(self) -> list[int]:
        """The processes of the ranks now."""
        try:
            return ranks_of(self.process)
        except OSError:  # the run has ended
            return []

    def choose(self, strike: Strike) -> int:
        """The process that a strike is aimed at; 0 without one."""
        self.find_new()
        alive = self.list_ranks()
        if strike.newcomer and self.newest in alive:
            return self.newest
        others = [pid for pid in alive if pid != self.newest] or alive
        return others[int(strike.pick * len(others))] if others else 0

    def strike(self, strike: Strike) -> str:
        """Strike; return what was struck."""
        if strike.waits:
            self.wait_for_newcomer()
        time.sleep(strike.delay)
        pid = self.choose(strike)
        if not pid:
            return "nothing"
        number = signal.SIGKILL if strike.how == "kill" else signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if strike.how == "blink":
            timer = threading.Timer(strike.pause, self.wake, (pid,))
            timer.daemon = True
            timer.start()
        if pid not in self.initial:
            return f"{strike.how} of a new process"
        self.struck_first.add(self.initial.index(pid))
        return f"{strike.how} of rank {self.initial.index(pid)}"

    def wake(self, pid: int) -> None:
        """Continue a process if it is still one of this run's."""
        if pid in self.list_ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def suffer(case: Case, alone: RunFolder, cache: Path, place: Path, pace: Pace = LONG) -> None:
    """Run a case and judge it."""
    began = time.monotonic()
    words = (*list_settings(case.name, cache, pace), f"processes_per_node={case.ranks}")
    elastic = ("elastic=true", f"elastic.timeout={pace.timeout}", SETUP)
    line = [sys.executable, "-m", "tests.harness.elastic", f"{case.name}+slow", "", f"runs={place}", *words, *elastic]
    process = Command(line, env=environment(), session=True)
    target = Target(process, place)
    try:
        if target.wait_for_step(case.begin):
            for strike in case.strikes:
                case.struck.append(target.strike(strike))
        process.wait(PATIENCE)
        case.outcome = judge(case, target, alone, process.err)
    except subprocess.TimeoutExpired:
        case.problem = f"FAILED: it has not ended within {PATIENCE:g} s"
    except AssertionError as error:
        case.problem = f"FAILED: {error}"
    finally:
        warm.end_session(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if case.problem:
            print(process.out + process.err, file=sys.stderr, flush=True)
        for pid in processes_of(str(place)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    case.seconds = time.monotonic() - began


def judge(case: Case, target: Target, alone: RunFolder, err: str) -> str:
    """Say how a run has ended, and that it had to. Raises AssertionError."""
    (path,) = target.runs.iterdir()
    folder = RunFolder(path)
    stuck = any(STUCK_REASON in log.read_text(errors="replace") for log in path.glob("attempts/*/logs/rank-*.log"))
    note = ", a rank was stuck in gloo" if stuck else ""
    if target.process.returncode == 0:
        wrong = differences(folder, alone)
        assert not wrong, wrong
        return f"equal{note}"
    reasons = [reason.name for reason in EndReason if reason.value in err]
    assert reasons, f"it ended with status {target.process.returncode} and no reason that allows it"
    assert reasons == ["STATE_LOST"] or 0 in target.struck_first or stuck, "rank 0 was not struck, and counts as lost"
    assert (
        reasons == ["SHARD_LOST"]
        or len(target.struck_first) == case.ranks
        or stuck
        or re.search("new process", " ".join(case.struck))
    ), "a rank that was not struck had the state"
    steps = [checkpoint.step for checkpoint in storage.list_resumable_checkpoints(folder)]
    again = resume(BY_NAME[case.name], folder)
    assert again.returncode == 0, f"the resumed run failed: {again.stderr}"
    assert not steps or f"resumed from step {max(steps)}" in again.stdout, f"not resumed after {max(steps)}"
    wrong = differences(folder, alone)
    assert not wrong, f"after a resume: {wrong}"
    return f"ended early ({', '.join(reasons)}{note}), resumed after step {max(steps, default=0)}, equal"


def list_settings(name: str, cache: Path, pace: Pace) -> tuple[str, ...]:
    """Settings of a run of an experiment, on any number of ranks."""
    return (*SMALL, *pace.settings, *SETTINGS[name], f"data.cache={cache}")


def train_alone(name: str, cache: Path, runs: Path) -> RunFolder:
    """The run of one process that nothing disturbs."""
    done = run(name, *list_settings(name, cache, LONG), "processes_per_node=1", runs=runs)
    assert done.status == 0, done.err
    return done.folder


def parse_arguments(description: str, cases: int) -> tuple[range, str]:
    """Return the numbers of the cases that the command line asks for, and the seed, which is printed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to continue a campaign")
    parser.add_argument("--seed", default="")
    given = parser.parse_args()
    seed = given.seed or draw_seed("elastic campaign").partition("/")[0]
    return range(given.first, given.cases), seed


def main() -> int:
    numbers, seed = parse_arguments(__doc__ or "", 200)
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    alone = {name: train_alone(name, scratch / "cache", scratch / "alone" / name) for name in SETTINGS}
    outcomes, failed = dict[str, int](), 0
    for number in numbers:
        case = draw_case(seed, number)
        place = scratch / str(number)
        suffer(case, alone[case.name], scratch / "cache", place)
        print(case.line(), flush=True)
        failed += bool(case.problem)
        kind = "failed" if case.problem else case.outcome.partition(",")[0]
        outcomes[kind] = outcomes.get(kind, 0) + 1
        if not case.problem:
            shutil.rmtree(place)
    print(f"seed {seed}, cases {numbers.start} to {numbers.stop - 1}: {outcomes}")
    if failed:
        print(f"the folders of the failed ones: {scratch}")
    else:
        shutil.rmtree(scratch)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
