"""Kill, stop and continue ranks of elastic runs at random moments around joins.

    python -m tests.harness.elastic.campaign --cases=200 [--first=K] [--seed=S]      about ten seconds per case
    python -m tests.cluster.elastic_campaign --cases=30                              about a minute per case

Each case strikes two or three times: first a rank, then, usually after its new process has appeared, that process or
another rank. A finished run must have the losses and scores of a run on one rank. A run may end early only if all ranks
with the state or a rank that serves a shard are lost. It is then resumed, and must have the same losses and scores.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import random
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
from tests.harness.commands import execution
from tests.harness.commands.execution import Command
from tests.harness.commands.processes import find_processes, make_environment, run_experiment
from tests.harness.elastic.faulty_runs import SMALL_RUN_SETTINGS, find_metric_differences
from tests.harness.environment.randomness import draw_seed
from tests.harness.experiments.registry import ENTRIES, ENTRY_BY_NAME
from tests.harness.runs.long_runs import list_rank_pids
from tests.harness.runs.resuming import resume_run

RUN_TIMEOUT = 60.0  # seconds; a run takes about six
SETUP_TIMEOUT_SETTING = "launch.setup_timeout=20"  # also the time limit for a new process
EXPERIMENT_SETTINGS = {entry.name: entry.elastic_campaign for entry in ENTRIES if entry.elastic_campaign is not None}
FAULT_KINDS = ("kill", "stop", "blink")


@dataclasses.dataclass(frozen=True)
class RunLength:
    """Length of the runs of a campaign. An epoch has 10 steps, and a step takes 20 ms."""

    steps: int
    saves: int
    """Steps between two checkpoints."""
    timeout: float
    """elastic.timeout; a process is stopped for at most two and a half times as long, unless it is never continued."""
    latest: int
    """Last step after which the first strike may come."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a run, elastic or not."""
        return f"steps={self.steps}", f"epochs={self.steps // 10}", f"checkpoint.every_steps={self.saves}"


LONG_RUN = RunLength(steps=200, saves=20, timeout=1.0, latest=60)
SHORT_RUN = RunLength(steps=60, saves=10, timeout=0.5, latest=12)


@dataclasses.dataclass
class ScheduledFault:
    """A fault: its target, its time and its kind."""

    kind: str
    """kill, stop (for ever) or blink (stop, and continue after `pause` seconds)."""
    newcomer: bool
    """Whether the target is the newest process of a rank."""
    waits: bool
    """Whether the strike waits for a new process."""
    pick: float
    """Selects one of the other ranks, from 0 to 1."""
    delay: float
    pause: float

    def __str__(self) -> str:
        length = f" {self.pause:.2f} s" if self.kind == "blink" else ""
        target = "new process" if self.newcomer else f"rank at {self.pick:.2f}"
        return f"{'join' if self.waits else 'then'} + {self.delay:.2f} s: {self.kind}{length} {target}"


@dataclasses.dataclass
class CampaignCase:
    """A run with its strikes, and the outcome."""

    number: int
    name: str
    ranks: int
    begin: int
    """Step after which the first strike comes."""
    strikes: list[ScheduledFault]
    struck: list[str] = dataclasses.field(default_factory=list)
    outcome: str = ""
    problem: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """Describe the case and its outcome in a line."""
        plan = f"{self.number:3} {self.name} on {self.ranks}, step {self.begin}, {'; '.join(map(str, self.strikes))}"
        struck = f"struck {', '.join(self.struck) or 'nothing'}"
        return f"{plan}: {struck}: {self.problem or self.outcome} ({self.seconds:.1f} s)"


def draw_case(seed: str, number: int, pace: RunLength = LONG_RUN) -> CampaignCase:
    """Draw the case with a number."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(sorted(EXPERIMENT_SETTINGS))
    strikes = [draw_first_fault(chance, pace)]
    for _ in range(chance.choice((1, 2))):
        strikes.append(draw_next_fault(chance, pace))
    return CampaignCase(number, name, chance.choice((2, 3, 4)), chance.randint(5, pace.latest), strikes)


def draw_first_fault(chance: random.Random, pace: RunLength) -> ScheduledFault:
    """Draw an immediate strike on a rank of the start."""
    return ScheduledFault(
        kind=chance.choice(FAULT_KINDS),
        newcomer=False,
        waits=False,
        pick=chance.random(),
        delay=0.0,
        pause=chance.uniform(0.1, 2.5 * pace.timeout),
    )


def draw_next_fault(chance: random.Random, pace: RunLength) -> ScheduledFault:
    return ScheduledFault(
        kind=chance.choice(FAULT_KINDS),
        newcomer=chance.random() < 0.5,
        waits=chance.random() < 0.8,
        pick=chance.random(),
        delay=chance.uniform(0, 0.8),
        pause=chance.uniform(0.1, 2.5 * pace.timeout),
    )


class FaultyRun:
    """The processes of a run that is struck."""

    newcomer_seconds = 4.0  # time limit for the new process of a rank

    def __init__(self, process: Command, runs: Path) -> None:
        self.process = process
        self.runs = runs
        self.initial = list[int]()
        self.seen = set[int]()
        """Process IDs that `find_new` has returned before."""
        self.newest = 0
        self.struck_first: set[int] = set()
        """Ranks whose first process was struck."""

    def has_ended(self) -> bool:
        """Return whether the run has ended."""
        return self.process.poll() is not None

    def note_first_processes(self) -> None:
        """Record the first process of each rank."""
        self.initial = self.list_ranks()
        self.seen = set(self.initial)

    def wait_for_step(self, step: int) -> bool:
        """Wait until a step is logged; return False if the run ends before."""
        while not self.has_ended():
            for file in self.runs.glob("*/attempts/0001/metrics.jsonl"):
                if len(file.read_bytes().splitlines()) > step:
                    self.note_first_processes()
                    return True
            time.sleep(0.02)
        return False

    def wait_for_newcomer(self) -> None:
        """Wait for the new process of a rank, for at most `newcomer_seconds`."""
        deadline = time.monotonic() + self.newcomer_seconds
        while time.monotonic() < deadline and not self.has_ended() and not self.find_new():
            time.sleep(0.005)

    def find_new(self) -> bool:
        """Record new processes; return whether there are any."""
        new = [pid for pid in self.list_ranks() if pid not in self.seen]
        self.seen.update(new)
        self.newest = new[-1] if new else self.newest
        return bool(new)

    def list_ranks(self) -> list[int]:
        """Return the current processes of the ranks."""
        try:
            return list_rank_pids(self.process)
        except OSError:  # the run has ended
            return []

    def choose(self, strike: ScheduledFault) -> int:
        """Return the target of a strike, or 0 if there is none."""
        self.find_new()
        running = self.list_ranks()
        if strike.newcomer and self.newest in running:
            return self.newest
        candidates = [pid for pid in running if pid != self.newest] or running
        return candidates[int(strike.pick * len(candidates))] if candidates else 0

    def strike(self, strike: ScheduledFault) -> str:
        """Execute a strike; return a description of what was struck."""
        if strike.waits:
            self.wait_for_newcomer()
        time.sleep(strike.delay)
        pid = self.choose(strike)
        if not pid:
            return "nothing"
        signal_number = signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)
        if strike.kind == "blink":
            timer = threading.Timer(strike.pause, self.wake, (pid,))
            timer.daemon = True
            timer.start()
        if pid not in self.initial:
            return f"{strike.kind} of a new process"
        rank = self.initial.index(pid)
        self.struck_first.add(rank)
        return f"{strike.kind} of rank {rank}"

    def wake(self, pid: int) -> None:
        """Continue a process if it still belongs to this run."""
        if pid in self.list_ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def execute_case(
    case: CampaignCase, undisturbed: RunFolder, cache: Path, place: Path, pace: RunLength = LONG_RUN
) -> None:
    """Execute a case, and set its outcome or problem."""
    started = time.monotonic()
    settings = (*list_run_settings(case.name, cache, pace), f"processes_per_node={case.ranks}")
    elastic_settings = ("elastic=true", f"elastic.timeout={pace.timeout}", SETUP_TIMEOUT_SETTING)
    arguments = (f"{case.name}+slow", "", f"runs={place}", *settings, *elastic_settings)
    process = Command(
        [sys.executable, "-m", "tests.harness.elastic.faults", *arguments], env=make_environment(), new_session=True
    )
    target = FaultyRun(process, place)
    try:
        if target.wait_for_step(case.begin):
            for strike in case.strikes:
                case.struck.append(target.strike(strike))
        process.wait(RUN_TIMEOUT)
        case.outcome = check_outcome(case, target, undisturbed, process.stderr)
    except subprocess.TimeoutExpired:
        case.problem = f"FAILED: the run did not end within {RUN_TIMEOUT:g} s"
    except AssertionError as error:
        case.problem = f"FAILED: {error}"
    finally:
        execution.kill_session(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if case.problem:
            print(process.stdout + process.stderr, file=sys.stderr, flush=True)
        for pid in find_processes(str(place)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    case.seconds = time.monotonic() - started


def check_outcome(case: CampaignCase, target: FaultyRun, undisturbed: RunFolder, err: str) -> str:
    """Return how a run has ended. Raises AssertionError if it should have ended in another way."""
    (path,) = target.runs.iterdir()
    folder = RunFolder(path)
    logs = [file.read_text(errors="replace") for file in path.glob("attempts/*/logs/rank-*.log")]
    is_stuck = any(STUCK_REASON in log for log in logs)
    note = ", a rank was stuck in gloo" if is_stuck else ""
    if target.process.returncode == 0:
        problems = find_metric_differences(folder, undisturbed)
        assert not problems, problems
        return f"equal{note}"

    reasons = [reason.name for reason in EndReason if reason.value in err]
    assert reasons, f"the run ended with status {target.process.returncode} without a permitted reason"
    if not is_stuck:
        check_end_reasons(reasons, case, target)
    last_step = max((checkpoint.step for checkpoint in storage.list_resumable_checkpoints(folder)), default=0)
    resumed = resume_run(ENTRY_BY_NAME[case.name], folder)
    assert resumed.returncode == 0, f"the resumed run failed: {resumed.stderr}"
    if last_step:
        assert f"resumed from step {last_step}" in resumed.stdout, f"not resumed from step {last_step}"
    problems = find_metric_differences(folder, undisturbed)
    assert not problems, f"after resuming: {problems}"
    return f"ended early ({', '.join(reasons)}{note}), resumed after step {last_step}, equal"


def check_end_reasons(reasons: list[str], case: CampaignCase, target: FaultyRun) -> None:
    """Check that the struck ranks explain why a run has ended early."""
    if reasons != ["STATE_LOST"]:
        assert 0 in target.struck_first, "rank 0 was not struck, but counts as lost"
    if reasons != ["SHARD_LOST"]:
        all_were_struck = len(target.struck_first) == case.ranks
        new_process_was_struck = any("new process" in struck for struck in case.struck)
        assert all_were_struck or new_process_was_struck, "a rank that was not struck had the state"


def list_run_settings(name: str, cache: Path, pace: RunLength) -> tuple[str, ...]:
    """Return the settings of a run of an experiment, on any number of ranks."""
    return (*SMALL_RUN_SETTINGS, *pace.settings, *EXPERIMENT_SETTINGS[name], f"data.cache={cache}")


def train_undisturbed(name: str, cache: Path, runs: Path) -> RunFolder:
    """Train a run on one rank without faults."""
    process = run_experiment(name, *list_run_settings(name, cache, LONG_RUN), "processes_per_node=1", runs=runs)
    assert process.returncode == 0, process.stderr
    return process.folder


def parse_arguments(description: str, cases: int) -> tuple[range, str]:
    """Parse the command line; return the numbers of the cases and the seed, which is printed if it is drawn."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to continue a campaign")
    parser.add_argument("--seed", default="")
    arguments = parser.parse_args()
    seed = arguments.seed or draw_seed("elastic campaign").partition("/")[0]
    return range(arguments.first, arguments.cases), seed


def main() -> int:
    numbers, seed = parse_arguments(__doc__ or "", 200)
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    undisturbed = {}
    for name in EXPERIMENT_SETTINGS:
        undisturbed[name] = train_undisturbed(name, scratch / "cache", scratch / "alone" / name)

    outcomes = collections.Counter[str]()
    for number in numbers:
        case = draw_case(seed, number)
        place = scratch / str(number)
        execute_case(case, undisturbed[case.name], scratch / "cache", place)
        print(case.line(), flush=True)
        outcomes["failed" if case.problem else case.outcome.partition(",")[0]] += 1
        if not case.problem:
            shutil.rmtree(place)

    print(f"seed {seed}, cases {numbers.start} to {numbers.stop - 1}: {dict(outcomes)}")
    if outcomes["failed"]:
        print(f"folders of the failed cases: {scratch}")
        return 1
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
