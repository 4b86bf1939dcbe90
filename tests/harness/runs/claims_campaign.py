"""Start, resume and cancel runs at random moments. Only one attempt may train at a time, and no result may be lost.

    python -m tests.harness.runs.claims_campaign --cases=50 --seed=1              on this machine, about ten minutes
    python -m tests.harness.runs.claims_campaign --cases=20 --seed=1 --cluster    on a new local SLURM cluster

Each case starts a run and executes two commands: while the run starts, while it trains, or after it has stopped. Then
the run is resumed until it is finished. Its losses must equal those of an undisturbed run bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common.data.prepare import prepare_digits
from common.runs.folder import RunFolder
from slurm.reports import status
from tests.harness.commands import execution
from tests.harness.commands.processes import find_processes, make_environment, make_run_command, wait_until
from tests.harness.repository import ROOT
from tests.harness.slurm.cluster_site import Site, create_shared_folder, start_cluster

EXPERIMENT = "mnist_pipeline"
RUN_SETTINGS = (
    "width=32",
    "epochs=20",
    "data.test_limit=500",
    "log.progress=none",
    "launch.threads=1",
    "checkpoint.every_seconds=1",
)
TOTAL_STEPS = 5000
MAX_FIRST_DELAY = 2.0  # seconds from the first step to the first command; the run must train longer
MAX_OVERLAP_SECONDS = 2.0  # seconds during which two attempts may train at the same time
MAX_STOPPING_SECONDS = 20.0  # from `make cancel` until no process trains
COMMAND_TIMEOUT = 150.0  # seconds; also the time limit for the end of a run
COMMAND_PAIRS = [
    *(("running", "resume", "resume"), ("running", "resume", "cancel"), ("running", "cancel", "resume")),
    *(("running", "cancel", "cancel"), ("stopped", "resume", "resume"), ("stopped", "resume", "cancel")),
    ("starting", "resume", "cancel"),
]
"""A phase of the run (starting, running or stopped) and the two commands that are executed in this phase."""
REFUSAL_PATTERN = re.compile(
    r"is already running|is stopping|is still running|being started|being submitted|was superseded|is RUNNING"
    r"|is PENDING|was just started|has just finished|cannot start"
)
CompletedCommand = subprocess.CompletedProcess[str]


class LocalRuns:
    """Runs on this machine."""

    def __init__(self, scratch: Path) -> None:
        self.runs = scratch / "runs"
        self.cache = scratch / "cache"
        prepare_digits(self.cache)
        self.env = make_environment()

    def start(self) -> CompletedCommand:
        settings = (*RUN_SETTINGS, f"steps={TOTAL_STEPS}", "data.name=digits", f"data.cache={self.cache}")
        argv = make_run_command(EXPERIMENT, *settings, runs=self.runs)
        return execution.execute_command(argv, env=self.env, timeout=COMMAND_TIMEOUT)

    def resume(self, run: RunFolder, random_stream: random.Random) -> CompletedCommand:
        script = [sys.executable, str(ROOT / "experiments" / f"{EXPERIMENT}.py"), "--resume", str(run.path)]
        verb = [sys.executable, "-m", "slurm", "exp", f"--resume={run.path}", "--launch=local"]
        argv = random_stream.choice([script, script, verb])
        return execution.execute_command(argv, env=self.env, timeout=COMMAND_TIMEOUT)

    def cancel(self, run: RunFolder) -> CompletedCommand:
        verb = [sys.executable, "-m", "slurm", "cancel", str(run.path)]
        return execution.execute_command(verb, env=self.env, timeout=COMMAND_TIMEOUT)

    def read_state(self, run: RunFolder) -> str:
        return status.read_state(run)[0]


class ClusterRuns:
    """Runs on a local SLURM cluster. Some of them are resumed on this machine."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.runs = site.runs / "campaign"

    def start(self) -> CompletedCommand:
        return self.site.submit(EXPERIMENT, "campaign", *RUN_SETTINGS, f"steps={TOTAL_STEPS}", options=("--nodes=1",))

    def resume(self, run: RunFolder, random_stream: random.Random) -> CompletedCommand:
        launch = random_stream.choice(["auto", "auto", "auto", "local"])
        return self.site.execute_module("slurm", "exp", f"--resume={run.path}", f"--launch={launch}", status=None)

    def cancel(self, run: RunFolder) -> CompletedCommand:
        return self.site.execute_module("slurm", "cancel", str(run.path), status=None)

    def read_state(self, run: RunFolder) -> str:
        process = self.site.execute_module("slurm", "status", str(run.path), status=None)
        last_row = process.stdout.splitlines()[-1]
        return last_row.split()[1]


@dataclasses.dataclass
class ClaimCase:
    """A run, two commands that are executed on it, and the results."""

    target: LocalRuns | ClusterRuns
    phase: str
    """The phase of the run in which the commands are executed: starting, running or stopped."""
    commands: tuple[str, str]
    random_stream: random.Random
    executed_commands: list[tuple[str, CompletedCommand]] = dataclasses.field(default_factory=list)
    """The finished commands, each with its name."""
    problems: list[str] = dataclasses.field(default_factory=list)
    live_commands: list[str] = dataclasses.field(default_factory=list)
    """The commands that started while the run had no result."""
    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Each step with its loss. Set when the case has been executed."""

    def execute_commands(self) -> RunFolder:
        """Start the run, execute the commands, and check the results. Appends to `problems`."""
        earlier_runs = set(self.target.runs.glob("*"))  # empty if the folder does not exist
        starter = self.start_command("start", 0.0)
        run = wait_until(lambda: find_new_run(self.target.runs, earlier_runs), "the run has a folder", COMMAND_TIMEOUT)
        watch = MetricsWatch(run)
        try:
            self.execute_pair(run, starter)
        finally:
            watch.stop()
        self.problems += watch.find_problems()
        self.check_outputs(run)
        return run

    def execute_pair(self, run: RunFolder, starter: threading.Thread) -> None:
        """Execute both commands in the phase of the case, and wait until the run has ended."""
        if self.phase != "starting":
            wait_until(lambda: has_metrics(run) or run.result, "the run trains", COMMAND_TIMEOUT)
        delay = self.random_stream.uniform(0.0, MAX_FIRST_DELAY)
        if self.phase == "stopped":
            time.sleep(delay)
            self.start_command("cancel", 0.0, run).join()
            starter.join()
            wait_until(lambda: not find_processes(str(run.path)), "the run has stopped", COMMAND_TIMEOUT)
            delay = 0.0
        threads = [starter]
        for name in self.commands:
            threads.append(self.start_command(name, delay, run))
            short_delay = self.random_stream.uniform(0.0, 0.5)
            long_delay = self.random_stream.uniform(0.0, 3.0)
            delay += self.random_stream.choice([0.0, short_delay, long_delay])
        for thread in threads:
            thread.join()
        self.wait_for_end(run)
        if self.phase == "running" and not self.live_commands:
            self.problems.append("the run had ended before the first command")

    def start_command(self, name: str, delay: float, run: RunFolder | None = None) -> threading.Thread:
        """Execute a command after `delay` seconds in a thread."""
        random_stream = random.Random(self.random_stream.random())

        def call() -> None:
            time.sleep(delay)
            if run is not None and not run.result:
                self.live_commands.append(name)
            try:
                self.executed_commands.append((name, self.execute_command(name, run, random_stream)))
            except subprocess.TimeoutExpired:
                self.problems.append(f"{name} did not exit")

        thread = threading.Thread(target=call)
        thread.start()
        return thread

    def execute_command(self, name: str, run: RunFolder | None, random_stream: random.Random) -> CompletedCommand:
        if name == "start":
            return self.target.start()
        assert run is not None
        if name == "resume":
            return self.target.resume(run, random_stream)
        return self.target.cancel(run)

    def wait_for_end(self, run: RunFolder) -> None:
        try:
            wait_until(
                lambda: self.target.read_state(run) in status.FINAL_STATES, "the run has ended", COMMAND_TIMEOUT, 0.3
            )
            wait_until(lambda: not find_processes(str(run.path)), "all its processes have exited", COMMAND_TIMEOUT, 0.3)
        except TimeoutError as error:
            self.problems.append(str(error))

    def check_outputs(self, run: RunFolder) -> None:
        """Check that a refused command gives a reason, and that exit status 0 means that the run is finished."""
        is_finished = "finished" in list_result_states(run)
        for name, process in self.executed_commands:
            output = process.stdout + process.stderr
            if "Traceback" in output:
                self.problems.append(f"{name}: a traceback: {output}")
            if name == "resume" and process.returncode == 2 and not REFUSAL_PATTERN.search(output):
                self.problems.append(f"{name}: refused without a reason: {output}")
            has_trained = isinstance(self.target, LocalRuns) and name != "cancel"
            if has_trained and process.returncode == 0 and not is_finished:
                self.problems.append(f"{name}: exit status 0, but no result is finished: {output}")
        logs = run.path.glob("attempts/*/logs/rank-*.log")
        tables = [log for log in logs if "test accuracy" in log.read_text()]
        if tables and not is_finished:
            self.problems.append(f"{tables} have a final table, but no result is finished")

    def resume_until_finished(self, run: RunFolder) -> None:
        """Resume the run until it is finished."""
        for _ in range(3):
            if run.result.get("state") == "finished":
                return
            if isinstance(self.target, LocalRuns):
                process = self.target.resume(run, self.random_stream)
            else:
                process = self.target.site.execute_module("slurm", "exp", f"--resume={run.path}", status=None)
            self.executed_commands.append(("last resume", process))
            self.wait_for_end(run)
        if run.result.get("state") != "finished":
            self.problems.append(f"the run could not be finished: {self.executed_commands[-1][1]}")

    def describe(self) -> str:
        """Return a line about the case and, if there is a problem, the outputs of the commands."""
        commands = " + ".join(self.commands)
        problems = "; ".join(self.problems)
        lines = [f"{self.phase:<9} {commands:<16} {problems or 'passed'}"]
        if self.problems:
            for name, process in self.executed_commands:
                last_output = process.stdout[-300:]
                last_errors = process.stderr[-600:]
                lines.append(f"    {name}: {process.returncode} {last_output!r} {last_errors!r}")
        return "\n".join(lines)


class MetricsWatch:
    """Record, in a thread, when the metrics of each attempt of a run grow."""

    def __init__(self, run: RunFolder) -> None:
        self.folder = run
        self.growth_times: dict[int, list[float]] = {}
        self.seconds_after_cancel = 0.0
        """Seconds for which an attempt trained after `make cancel`."""
        self.error: Exception | None = None
        """Exception that ended the thread."""
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        try:
            self.record_growth()
        except Exception as error:
            self.error = error

    def record_growth(self) -> None:
        sizes: dict[int, int] = {}
        while not self.is_over.wait(0.1):
            for attempt in self.folder.list_attempts():
                size = attempt.metrics_file.stat().st_size if attempt.metrics_file.exists() else 0
                if size > sizes.get(attempt.number, 0):
                    self.growth_times.setdefault(attempt.number, []).append(time.time())
                    self.record_training_after_cancel()
                sizes[attempt.number] = size

    def record_training_after_cancel(self) -> None:
        if self.folder.result.get("state") == "cancelled":
            result_file = self.folder.path / "result.json"
            try:
                seconds = time.time() - result_file.stat().st_mtime
            except FileNotFoundError:  # moved, because the run was resumed
                return
            self.seconds_after_cancel = max(self.seconds_after_cancel, seconds)

    def stop(self) -> None:
        self.is_over.set()
        self.thread.join()

    def find_problems(self) -> list[str]:
        problems = []
        if self.error is not None:
            problems.append(f"the metrics were not watched to the end: {self.error!r}")
        if self.seconds_after_cancel > MAX_STOPPING_SECONDS:
            problems.append(f"the run trained for {self.seconds_after_cancel:.1f} s after it was cancelled")
        for number, next_number in itertools.pairwise(sorted(self.growth_times)):
            times = self.growth_times[number]
            next_times = self.growth_times[next_number]
            first_end = min(times[-1], next_times[-1])
            last_start = max(times[0], next_times[0])
            overlap = first_end - last_start
            if overlap > MAX_OVERLAP_SECONDS:
                problems.append(f"attempts {number} and {next_number} trained together for {overlap:.1f} s")
        return problems


def find_new_run(runs: Path, earlier_runs: set[Path]) -> RunFolder | None:
    for path in runs.glob("*-*"):
        if path not in earlier_runs and (path / "config.yaml").exists():
            return RunFolder(path)
    return None


def has_metrics(run: RunFolder) -> bool:
    return any(attempt.metrics_file.exists() for attempt in run.list_attempts())


def list_result_states(run: RunFolder) -> list[str]:
    """Return the states in the results of the run and of its attempts."""
    folders = [RunFolder(run.path)]
    folders += [RunFolder(attempt.attempt_folder) for attempt in run.list_attempts()]
    return [str(folder.result.get("state")) for folder in folders if folder.result]


def list_losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(row["global_step"], row["loss"]) for row in run.read_metrics() if "loss" in row]


def train_undisturbed(target: LocalRuns | ClusterRuns) -> list[tuple[int, float]]:
    """Train an undisturbed run, which must be the first one of `target`; return its losses."""
    target.start()
    (path,) = target.runs.glob("*-*")
    wait_until(lambda: RunFolder(path).result, "the undisturbed run is finished", COMMAND_TIMEOUT)
    losses = list_losses(RunFolder(path))
    assert len(losses) == TOTAL_STEPS, RunFolder(path).result
    return losses


def execute_case(
    target: LocalRuns | ClusterRuns,
    random_stream: random.Random,
    pair: tuple[str, str, str],
    *,
    resumes_until_finished: bool = True,
) -> ClaimCase:
    """Execute a case and print a line about it.

    With `resumes_until_finished`, the run is resumed until it is finished. The metrics must contain each step once.
    """
    phase, first_command, second_command = pair
    case = ClaimCase(target, phase, (first_command, second_command), random.Random(random_stream.random()))
    run = case.execute_commands()
    if resumes_until_finished:
        case.resume_until_finished(run)
    case.losses = list_losses(run)
    steps = TOTAL_STEPS if resumes_until_finished else len(case.losses)
    logged_steps = [step for step, _ in case.losses]
    if logged_steps != list(range(1, steps + 1)):
        case.problems.append("the metrics do not contain each step once")
    print(f"{run.path.name}  {case.describe()}", flush=True)
    if not case.problems:
        shutil.rmtree(run.path)
    return case


def execute_cases(
    target: LocalRuns | ClusterRuns, random_stream: random.Random, pairs: list[tuple[str, str, str]]
) -> list[ClaimCase]:
    """Execute a case for each pair, and compare its losses with those of an undisturbed run."""
    expected_losses = train_undisturbed(target)
    cases = []
    for pair in pairs:
        case = execute_case(target, random_stream, pair)
        if case.losses != expected_losses:
            case.problems.append("the losses differ from those of an undisturbed run")
            print(case.describe(), flush=True)
        cases.append(case)
    return cases


def choose_command_pairs(count: int, random_stream: random.Random) -> list[tuple[str, str, str]]:
    """Choose `count` pairs, each equally often, in random order."""
    pairs = [COMMAND_PAIRS[number % len(COMMAND_PAIRS)] for number in range(count)]
    random_stream.shuffle(pairs)
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cluster", action="store_true")
    arguments = parser.parse_args()
    print(f"--seed={arguments.seed} --cases={arguments.cases} repeats the random choices", flush=True)
    draw = random.Random(arguments.seed)
    pairs = choose_command_pairs(arguments.cases, draw)
    started = time.monotonic()
    if arguments.cluster:
        with create_shared_folder() as scratch:
            prepare_digits(scratch / "cache")
            with start_cluster(Site(scratch / "site", scratch / "cache")) as site:
                cases = execute_cases(ClusterRuns(site), draw, pairs)
    else:
        scratch = Path(tempfile.mkdtemp(prefix="claims-"))
        cases = execute_cases(LocalRuns(scratch), draw, pairs)
    failed = [case for case in cases if case.problems]
    seconds = time.monotonic() - started
    print(f"{len(cases)} cases, {len(failed)} with problems, {seconds:.0f} s, seed {arguments.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
