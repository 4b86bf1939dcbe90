"""Kill, stop and continue ranks of elastic runs at random moments around joins.

    python -m tests.harness.elastic.campaign --cases=200 [--first=K] [--seed=S]      about ten seconds per case
    python -m tests.cluster.elastic_campaign --cases=30                              about a minute per case

Each case has two or three faults. The first one is a fault of a rank. The next one is usually executed after the new
process of this rank has started, and is a fault of this process or of another rank. A finished run must have the losses
and scores of a run on one rank. A run may end early only if all ranks with the state or a rank that serves a shard are
lost. It is then resumed, and must have the same losses and scores.
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
EXPERIMENT_SETTINGS = {
    entry.name: entry.elastic_campaign_settings for entry in ENTRIES if entry.elastic_campaign_settings is not None
}
FAULT_KINDS = ("kill", "stop", "pause")


@dataclasses.dataclass(frozen=True)
class RunLength:
    """Length of the runs of a campaign. An epoch has 10 steps, and a step takes 20 ms."""

    steps: int
    checkpoint_interval: int
    """Steps between two checkpoints."""
    elastic_timeout: float
    """elastic.timeout; a process is stopped for at most two and a half times as long, unless it is never continued."""
    max_first_fault_step: int
    """Last step after which the first fault may be executed."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a run, elastic or not."""
        return f"steps={self.steps}", f"epochs={self.steps // 10}", f"checkpoint.every_steps={self.checkpoint_interval}"


LONG_RUN = RunLength(steps=200, checkpoint_interval=20, elastic_timeout=1.0, max_first_fault_step=60)
SHORT_RUN = RunLength(steps=60, checkpoint_interval=10, elastic_timeout=0.5, max_first_fault_step=12)


@dataclasses.dataclass
class ScheduledFault:
    """A signal to a process of a rank: its kind, its target and its time."""

    kind: str
    """kill, stop (and never continue) or pause (stop, and continue after `pause_seconds`)."""
    hits_new_process: bool
    """Whether the target is the newest process of a rank."""
    waits_for_new_process: bool
    """Whether to wait for a new process before the delay."""
    rank_choice: float
    """Selects one of the other ranks: 0 the first, almost 1 the last."""
    delay: float
    """Seconds after the previous fault or, if this fault waits, after the start of the new process."""
    pause_seconds: float

    def __str__(self) -> str:
        length = f" {self.pause_seconds:.2f} s" if self.kind == "pause" else ""
        target = "new process" if self.hits_new_process else f"rank at {self.rank_choice:.2f}"
        return f"{'join' if self.waits_for_new_process else 'then'} + {self.delay:.2f} s: {self.kind}{length} {target}"


@dataclasses.dataclass
class CampaignCase:
    """A run with its faults, and the outcome."""

    number: int
    name: str
    ranks: int
    first_fault_step: int
    """Step after which the first fault is executed."""
    faults: list[ScheduledFault]
    executed_faults: list[str] = dataclasses.field(default_factory=list)
    """Descriptions of the faults that were executed."""
    outcome: str = ""
    problem: str = ""
    seconds: float = 0.0

    def format_line(self) -> str:
        """Describe the case and its outcome in a line."""
        run = f"{self.number:3} {self.name} on {self.ranks}"
        planned = "; ".join(map(str, self.faults))
        executed = ", ".join(self.executed_faults) or "nothing"
        outcome = self.problem or self.outcome
        return f"{run}, step {self.first_fault_step}, {planned}: executed {executed}: {outcome} ({self.seconds:.1f} s)"


def draw_case(seed: str, number: int, run_length: RunLength = LONG_RUN) -> CampaignCase:
    """Draw the case with a number."""
    random_stream = random.Random(f"{seed}/{number}")
    name = random_stream.choice(sorted(EXPERIMENT_SETTINGS))
    faults = [draw_first_fault(random_stream, run_length)]
    for _ in range(random_stream.choice((1, 2))):
        faults.append(draw_next_fault(random_stream, run_length))
    ranks = random_stream.choice((2, 3, 4))
    first_fault_step = random_stream.randint(5, run_length.max_first_fault_step)
    return CampaignCase(number, name, ranks, first_fault_step, faults)


def draw_first_fault(random_stream: random.Random, run_length: RunLength) -> ScheduledFault:
    """Draw an immediate fault of the first process of a rank."""
    return ScheduledFault(
        kind=random_stream.choice(FAULT_KINDS),
        hits_new_process=False,
        waits_for_new_process=False,
        rank_choice=random_stream.random(),
        delay=0.0,
        pause_seconds=random_stream.uniform(0.1, 2.5 * run_length.elastic_timeout),
    )


def draw_next_fault(random_stream: random.Random, run_length: RunLength) -> ScheduledFault:
    return ScheduledFault(
        kind=random_stream.choice(FAULT_KINDS),
        hits_new_process=random_stream.random() < 0.5,
        waits_for_new_process=random_stream.random() < 0.8,
        rank_choice=random_stream.random(),
        delay=random_stream.uniform(0, 0.8),
        pause_seconds=random_stream.uniform(0.1, 2.5 * run_length.elastic_timeout),
    )


class FaultyRun:
    """The processes of a run with faults."""

    new_process_timeout = 4.0  # time limit for the new process of a rank

    def __init__(self, process: Command, runs: Path) -> None:
        self.process = process
        self.runs = runs
        self.first_processes = list[int]()
        self.known_processes = set[int]()
        """IDs of processes that have been recorded."""
        self.newest_process = 0
        self.faulty_first_ranks: set[int] = set()
        """Ranks whose first process had a fault."""

    def has_ended(self) -> bool:
        """Return whether the run has ended."""
        return self.process.poll() is not None

    def record_first_processes(self) -> None:
        """Record the first process of each rank."""
        self.first_processes = self.list_rank_pids()
        self.known_processes = set(self.first_processes)

    def wait_for_step(self, step: int) -> bool:
        """Wait until a step is logged; return False if the run ends earlier."""
        while not self.has_ended():
            for file in self.runs.glob("*/attempts/0001/metrics.jsonl"):
                if len(file.read_bytes().splitlines()) > step:
                    self.record_first_processes()
                    return True
            time.sleep(0.02)
        return False

    def wait_for_new_process(self) -> None:
        """Wait for the new process of a rank, for at most `new_process_timeout` seconds."""
        deadline = time.monotonic() + self.new_process_timeout
        while time.monotonic() < deadline and not self.has_ended() and not self.record_new_processes():
            time.sleep(0.005)

    def record_new_processes(self) -> bool:
        """Record new processes; return whether there are any."""
        new = [pid for pid in self.list_rank_pids() if pid not in self.known_processes]
        self.known_processes.update(new)
        self.newest_process = new[-1] if new else self.newest_process
        return bool(new)

    def list_rank_pids(self) -> list[int]:
        """Return the current processes of the ranks."""
        try:
            return list_rank_pids(self.process)
        except OSError:  # the run has ended
            return []

    def choose_process(self, fault: ScheduledFault) -> int:
        """Return the process ID of the target of a fault, or 0 if there is none."""
        self.record_new_processes()
        running = self.list_rank_pids()
        if fault.hits_new_process and self.newest_process in running:
            return self.newest_process
        candidates = [pid for pid in running if pid != self.newest_process] or running
        if not candidates:
            return 0
        index = int(fault.rank_choice * len(candidates))
        return candidates[index]

    def execute_faults(self, case: CampaignCase) -> None:
        """Execute the faults of a case. Raises AssertionError if the run ends before the first one."""
        for fault in case.faults:
            case.executed_faults.append(self.execute_fault(fault))
        assert case.executed_faults[0] != "nothing", "the run ended before the first fault"

    def execute_fault(self, fault: ScheduledFault) -> str:
        """Execute a fault, and describe it."""
        if fault.waits_for_new_process:
            self.wait_for_new_process()
        time.sleep(fault.delay)
        pid = self.choose_process(fault)
        if not pid:
            return "nothing"
        signal_number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            return "nothing"
        if fault.kind == "pause":
            timer = threading.Timer(fault.pause_seconds, self.continue_process, (pid,))
            timer.daemon = True
            timer.start()
        if pid not in self.first_processes:
            return f"{fault.kind} of a new process"
        rank = self.first_processes.index(pid)
        self.faulty_first_ranks.add(rank)
        return f"{fault.kind} of rank {rank}"

    def continue_process(self, pid: int) -> None:
        """Continue a process if it still belongs to this run."""
        if pid in self.list_rank_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def execute_case(
    case: CampaignCase, undisturbed: RunFolder, cache: Path, runs: Path, run_length: RunLength = LONG_RUN
) -> None:
    """Execute a case, and set its outcome or problem."""
    started = time.monotonic()
    settings = (*list_run_settings(case.name, cache, run_length), f"processes_per_node={case.ranks}")
    elastic_settings = ("elastic=true", f"elastic.timeout={run_length.elastic_timeout}", SETUP_TIMEOUT_SETTING)
    arguments = (f"{case.name}+slow", "", f"runs={runs}", *settings, *elastic_settings)
    argv = [sys.executable, "-m", "tests.harness.elastic.faults", *arguments]
    process = Command(argv, env=make_environment(), new_session=True)
    faulty_run = FaultyRun(process, runs)
    try:
        assert faulty_run.wait_for_step(case.first_fault_step), "the run ended before the step of the first fault"
        faulty_run.execute_faults(case)
        process.wait(RUN_TIMEOUT)
        case.outcome = check_outcome(case, faulty_run, undisturbed, process.stderr)
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
        for pid in find_processes(str(runs)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    case.seconds = time.monotonic() - started


def check_outcome(case: CampaignCase, faulty_run: FaultyRun, undisturbed: RunFolder, stderr: str) -> str:
    """Return how a run has ended. Raises AssertionError if it should have ended in another way."""
    (path,) = faulty_run.runs.iterdir()
    folder = RunFolder(path)
    log_files = path.glob("attempts/*/logs/rank-*.log")
    logs = [file.read_text(errors="replace") for file in log_files]
    is_stuck = any(STUCK_REASON in log for log in logs)
    note = ", a rank was stuck in gloo" if is_stuck else ""
    if faulty_run.process.returncode == 0:
        problems = find_metric_differences(folder, undisturbed)
        assert not problems, problems
        return f"equal{note}"

    reasons = [reason.name for reason in EndReason if reason.value in stderr]
    assert reasons, f"the run ended with status {faulty_run.process.returncode} without a permitted reason"
    if not is_stuck:
        check_end_reasons(reasons, case, faulty_run)
    checkpoints = storage.list_resumable_checkpoints(folder)
    last_step = max((checkpoint.step for checkpoint in checkpoints), default=0)
    resumed = resume_run(ENTRY_BY_NAME[case.name], folder)
    assert resumed.returncode == 0, f"the resumed run failed: {resumed.stderr}"
    if last_step:
        assert f"resumed from step {last_step}" in resumed.stdout, f"not resumed from step {last_step}"
    problems = find_metric_differences(folder, undisturbed)
    assert not problems, f"after resuming: {problems}"
    return f"ended early ({', '.join(reasons)}{note}), resumed after step {last_step}, equal"


def check_end_reasons(reasons: list[str], case: CampaignCase, faulty_run: FaultyRun) -> None:
    """Check that the executed faults explain why a run has ended early."""
    if reasons != ["STATE_LOST"]:
        assert 0 in faulty_run.faulty_first_ranks, "rank 0 had no fault, but counts as lost"
    if reasons != ["SHARD_LOST"]:
        all_first_processes_failed = len(faulty_run.faulty_first_ranks) == case.ranks
        new_process_failed = any("new process" in fault for fault in case.executed_faults)
        assert all_first_processes_failed or new_process_failed, "a rank without a fault had the state"


def list_run_settings(name: str, cache: Path, run_length: RunLength) -> tuple[str, ...]:
    """Return the settings of a run of an experiment, on any number of ranks."""
    return (*SMALL_RUN_SETTINGS, *run_length.settings, *EXPERIMENT_SETTINGS[name], f"data.cache={cache}")


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
        runs = scratch / str(number)
        execute_case(case, undisturbed[case.name], scratch / "cache", runs)
        print(case.format_line(), flush=True)
        outcomes["failed" if case.problem else case.outcome.partition(",")[0]] += 1
        if not case.problem:
            shutil.rmtree(runs)

    print(f"seed {seed}, cases {numbers.start} to {numbers.stop - 1}: {dict(outcomes)}")
    if outcomes["failed"]:
        print(f"folders of the failed cases: {scratch}")
        return 1
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
