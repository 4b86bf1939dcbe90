"""Pairs of start, resume and cancel at random moments: one attempt trains at a time, and no result is lost.

    python -m tests.harness.claims_campaign --cases=50 --seed=1              on this machine, about ten minutes
    python -m tests.harness.claims_campaign --cases=20 --seed=1 --cluster    on a local SLURM cluster of its own

Each case starts a run, and two commands meet: both while it trains, or both after it has stopped. In the end the run is
resumed until it is finished, and its losses must equal, to the bit, those of a run that nobody disturbed.
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
from tests.harness import warm
from tests.harness.processes import command, environment, processes_of, wait_until
from tests.harness.site import Site, folder, up

NAME = "mnist_pipeline"
WORDS = (
    "width=32",
    "epochs=20",
    "data.test_limit=500",
    "log.progress=none",
    "launch.threads=1",
    "checkpoint.every_seconds=1",
)
STEPS = 5000
ALLOWED_OVERLAP = 2.0  # seconds for which two attempts may train at once
STOPPING_SECONDS = 20.0  # from `make cancel` until nothing trains any more
PATIENCE = 150.0
PAIRS = [
    *(("running", "resume", "resume"), ("running", "resume", "cancel"), ("running", "cancel", "resume")),
    *(("running", "cancel", "cancel"), ("stopped", "resume", "resume"), ("stopped", "resume", "cancel")),
    ("beginning", "resume", "cancel"),
]
"""When two commands come, and which: while the run trains, after it has stopped, as it begins."""
REFUSAL = re.compile(
    r"is already running|is stopping|is still running|being started|being submitted|was superseded|is RUNNING"
    r"|is PENDING|was just started|has just finished|cannot start"
)
Done = subprocess.CompletedProcess[str]


class LocalPlace:
    """Runs of this machine."""

    def __init__(self, scratch: Path) -> None:
        self.runs = scratch / "runs"
        self.cache = scratch / "cache"
        prepare_digits(self.cache)
        self.env = environment()

    def start(self) -> Done:
        words = (*WORDS, f"steps={STEPS}", "data.name=digits", f"data.cache={self.cache}")
        return warm.execute(command(NAME, *words, runs=self.runs), env=self.env, timeout=PATIENCE)

    def resume(self, run: RunFolder, draw: random.Random) -> Done:
        script = [sys.executable, str(warm.ROOT / "experiments" / f"{NAME}.py"), "--resume", str(run.path)]
        verb = [sys.executable, "-m", "slurm", "exp", f"--resume={run.path}", "--launch=local"]
        return warm.execute(draw.choice([script, script, verb]), env=self.env, timeout=PATIENCE)

    def cancel(self, run: RunFolder) -> Done:
        words = [sys.executable, "-m", "slurm", "cancel", str(run.path)]
        return warm.execute(words, env=self.env, timeout=PATIENCE)

    def read_state(self, run: RunFolder) -> str:
        return status.read_state(run)[0]


class ClusterPlace:
    """Runs of a local SLURM cluster; some are resumed on this machine instead."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.runs = site.runs / "campaign"

    def start(self) -> Done:
        return self.site.submit(NAME, "campaign", *WORDS, f"steps={STEPS}", options=("--nodes=1",))

    def resume(self, run: RunFolder, draw: random.Random) -> Done:
        launch = draw.choice(["auto", "auto", "auto", "local"])
        return self.site.call("slurm", "exp", f"--resume={run.path}", f"--launch={launch}", status=None)

    def cancel(self, run: RunFolder) -> Done:
        return self.site.call("slurm", "cancel", str(run.path), status=None)

    def read_state(self, run: RunFolder) -> str:
        shown = self.site.call("slurm", "status", str(run.path), status=None).stdout.splitlines()
        return shown[-1].split()[1]


@dataclasses.dataclass
class Case:
    """One run, and what two commands made of it."""

    place: LocalPlace | ClusterPlace
    when: str
    commands: tuple[str, str]
    draw: random.Random
    said: list[tuple[str, Done]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """By step, once the run is finished."""

    def run(self) -> RunFolder:
        """Start the run, let the commands meet, and check what came of it; problems are in `problems`."""
        known = set(self.place.runs.glob("*")) if self.place.runs.exists() else set()
        starter = self.call_later("start", 0.0)
        run = wait_until(lambda: find_new_run(self.place.runs, known), "the run has a folder", PATIENCE)
        watch = Watch(run)
        if self.when != "beginning":
            wait_until(lambda: has_rows(run) or run.result, "it trains", PATIENCE)
        delay = self.draw.uniform(0.0, 2.0)
        if self.when == "stopped":
            time.sleep(delay)
            self.call_later("cancel", 0.0, run).join()
            starter.join()
            wait_until(lambda: not processes_of(str(run.path)), "it has stopped", PATIENCE)
            delay = 0.0
        threads = [starter]
        for name in self.commands:
            threads.append(self.call_later(name, delay, run))
            delay += self.draw.choice([0.0, self.draw.uniform(0.0, 0.5), self.draw.uniform(0.0, 3.0)])
        for thread in threads:
            thread.join()
        self.wait_for_end(run)
        watch.stop()
        self.problems += watch.find_problems()
        self.check_said(run)
        return run

    def call_later(self, name: str, delay: float, run: RunFolder | None = None) -> threading.Thread:
        own = random.Random(self.draw.random())

        def call() -> None:
            time.sleep(delay)
            try:
                if name == "start":
                    done = self.place.start()
                elif name == "resume":
                    assert run is not None
                    done = self.place.resume(run, own)
                else:
                    assert run is not None
                    done = self.place.cancel(run)
                self.said.append((name, done))
            except subprocess.TimeoutExpired:
                self.problems.append(f"{name} did not end")

        thread = threading.Thread(target=call)
        thread.start()
        return thread

    def wait_for_end(self, run: RunFolder) -> None:
        try:
            wait_until(lambda: self.place.read_state(run) in status.FINAL_STATES, "the run is over", PATIENCE, 0.3)
            wait_until(lambda: not processes_of(str(run.path)), "nothing of it is left", PATIENCE, 0.3)
        except TimeoutError as error:
            self.problems.append(str(error))

    def check_said(self, run: RunFolder) -> None:
        """A command that was refused says so; one that ends with 0 finished the run, or found it finished."""
        for name, done in self.said:
            text = done.stdout + done.stderr
            if "Traceback" in text:
                self.problems.append(f"{name}: a traceback: {text}")
            if name == "resume" and done.returncode == 2 and not REFUSAL.search(text):
                self.problems.append(f"{name}: refused without a reason: {text}")
            has_trained = isinstance(self.place, LocalPlace) and name != "cancel"
            if has_trained and done.returncode == 0 and "finished" not in list_results(run):
                self.problems.append(f"{name}: ended with 0, and no result is finished: {text}")
        tables = [log for log in run.path.glob("attempts/*/logs/rank-*.log") if "test accuracy" in log.read_text()]
        if tables and "finished" not in list_results(run):
            self.problems.append(f"{tables} have a final table, and no result is finished")

    def finish(self, run: RunFolder) -> None:
        """Resume the run until it is finished."""
        for _ in range(3):
            if run.result.get("state") == "finished":
                return
            if isinstance(self.place, LocalPlace):
                done = self.place.resume(run, self.draw)
            else:
                done = self.place.site.call("slurm", "exp", f"--resume={run.path}", status=None)
            self.said.append(("last resume", done))
            self.wait_for_end(run)
        if run.result.get("state") != "finished":
            self.problems.append(f"it was not finished in the end: {self.said[-1][1]}")

    def describe(self) -> str:
        """One line, and what commands said where there is a problem."""
        lines = [f"{self.when:<9} {' + '.join(self.commands):<16} {'; '.join(self.problems) or 'right'}"]
        if self.problems:
            lines += [
                f"    {name}: {done.returncode} {done.stdout[-300:]!r} {done.stderr[-600:]!r}"
                for name, done in self.said
            ]
        return "\n".join(lines)


class Watch:
    """Watch over the attempts of a run, from outside: when the metrics of each grow."""

    def __init__(self, run: RunFolder) -> None:
        self.folder = run
        self.grown: dict[int, list[float]] = {}
        self.after_cancel = 0.0
        """Seconds after `make cancel` for which an attempt went on to train."""
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()

    def look(self) -> None:
        sizes: dict[int, int] = {}
        while not self.is_over.wait(0.1):
            for attempt in self.folder.list_attempts():
                size = attempt.metrics_file.stat().st_size if attempt.metrics_file.exists() else 0
                if size > sizes.get(attempt.number, 0):
                    self.grown.setdefault(attempt.number, []).append(time.time())
                    self.note_cancelled()
                sizes[attempt.number] = size

    def note_cancelled(self) -> None:
        if self.folder.result.get("state") == "cancelled":
            age = time.time() - (self.folder.path / "result.json").stat().st_mtime
            self.after_cancel = max(self.after_cancel, age)

    def stop(self) -> None:
        self.is_over.set()
        self.thread.join()

    def find_problems(self) -> list[str]:
        problems = []
        if self.after_cancel > STOPPING_SECONDS:
            problems.append(f"it trained for {self.after_cancel:.1f} s after it was cancelled")
        times = sorted(self.grown.items())
        for (number, grown), (later, following) in itertools.pairwise(times):
            overlap = min(grown[-1], following[-1]) - max(grown[0], following[0])
            if overlap > ALLOWED_OVERLAP:
                problems.append(f"attempts {number} and {later} trained at once for {overlap:.1f} s")
        return problems


def find_new_run(runs: Path, known: set[Path]) -> RunFolder | None:
    new = [path for path in runs.glob("*-*") if path not in known and (path / "config.yaml").exists()]
    return RunFolder(new[0]) if new else None


def has_rows(run: RunFolder) -> bool:
    return any(attempt.metrics_file.exists() for attempt in run.list_attempts())


def list_results(run: RunFolder) -> list[str]:
    """The states in the results of the run and of its attempts."""
    folders = [RunFolder(run.path), *(RunFolder(attempt.attempt_folder) for attempt in run.list_attempts())]
    return [str(one.result.get("state")) for one in folders if one.result]


def list_losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(row["global_step"], row["loss"]) for row in run.read_metrics() if "loss" in row]


def train_undisturbed(place: LocalPlace | ClusterPlace) -> list[tuple[int, float]]:
    """Train a run that nobody disturbs; return its losses. It is the first of its place."""
    place.start()
    (path,) = place.runs.glob("*-*")
    wait_until(lambda: RunFolder(path).result, "the undisturbed run is finished", PATIENCE)
    losses = list_losses(RunFolder(path))
    assert len(losses) == STEPS, RunFolder(path).result
    return losses


def do_case(
    place: LocalPlace | ClusterPlace, draw: random.Random, pair: tuple[str, str, str], *, finishes: bool = True
) -> Case:
    """Do a case; print a line on it. The run is resumed until it `finishes`, and must have each step once."""
    when, *commands = pair
    case = Case(place, when, (commands[0], commands[1]), random.Random(draw.random()))
    run = case.run()
    if finishes:
        case.finish(run)
    case.losses = list_losses(run)
    if [step for step, _ in case.losses] != list(range(1, STEPS + 1 if finishes else len(case.losses) + 1)):
        case.problems.append("its rows have not each step once")
    print(f"{run.path.name}  {case.describe()}", flush=True)
    if not case.problems:
        shutil.rmtree(run.path)
    return case


def do_cases(place: LocalPlace | ClusterPlace, draw: random.Random, pairs: list[tuple[str, str, str]]) -> list[Case]:
    """Do a case for each pair, and compare its losses with those of an undisturbed run."""
    right = train_undisturbed(place)
    cases = []
    for pair in pairs:
        case = do_case(place, draw, pair)
        if case.losses != right:
            case.problems.append("its losses are not those of an undisturbed run")
            print(case.describe(), flush=True)
        cases.append(case)
    return cases


def choose_pairs(count: int, draw: random.Random) -> list[tuple[str, str, str]]:
    """Choose so many pairs, each as often as another."""
    pairs = [PAIRS[number % len(PAIRS)] for number in range(count)]
    draw.shuffle(pairs)
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cluster", action="store_true")
    given = parser.parse_args()
    print(f"--seed={given.seed} --cases={given.cases} repeats the random choices", flush=True)
    draw = random.Random(given.seed)
    pairs = choose_pairs(given.cases, draw)
    began = time.monotonic()
    if given.cluster:
        with folder() as scratch:
            prepare_digits(scratch / "cache")
            with up(Site(scratch / "site", scratch / "cache")) as site:
                cases = do_cases(ClusterPlace(site), draw, pairs)
    else:
        scratch = Path(tempfile.mkdtemp(prefix="claims-"))
        cases = do_cases(LocalPlace(scratch), draw, pairs)
    wrong = [case for case in cases if case.problems]
    print(f"{len(cases)} cases, {len(wrong)} with problems, {time.monotonic() - began:.0f} s, seed {given.seed}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
