"""A run that is told to stop at moments drawn by chance, from its preparation to its final report, and then goes on.

    python -m tests.harness.random_moments --images=60000 --moments=20       forty trials, about half an hour

Each trial prepares a folder of small JPEGs anew, trains, evaluates and saves; the moment is anywhere in the
time that all of it takes. The end must be equal to the bit to that of a run which nobody stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from common.runs.folder import RunFolder
from tests.harness import warm
from tests.harness.chance import open_stream
from tests.harness.processes import command, environment, processes_of
from tests.harness.resuming import differences
from tests.harness.warm import ROOT

CLASSES = 10
SIDE = 32  # pixels
LEAVES_WITHIN = 10.0  # seconds
NAME = "ddp_multinode"
WORDS = ("data.name=imagefolder", f"data.image_size={SIDE}", "batch=64", "steps=30", "epochs=1",
         "optim.warmup=0", "checkpoint.every_steps=10", "checkpoint.every_seconds=0",
         "log.progress=none", "launch.threads=1", "processes_per_node=2")  # fmt: skip


@dataclasses.dataclass
class Trial:
    """What became of one run that was told to stop."""

    number: signal.Signals
    moment: float
    """Seconds after its start."""
    left: float = math.nan
    """Seconds from the notice to the end of its processes."""
    status: int | None = None
    """Exit status of the stopped run."""
    reached: str = "?"
    problem: str = ""
    """The first difference from the run that nobody stopped, or what failed."""

    def line(self) -> str:
        told = f"{self.number.name:<8} after {self.moment:6.2f} s, {self.reached:<24} left within {self.left:5.2f} s"
        return f"{told}, status {self.status}  {self.problem or 'equal to the bit'}"


def make_images(root: Path, count: int) -> None:
    """Write so many JPEGs, five of six for training: noise around a grey level of their class."""
    draw = np.random.default_rng(0)
    for part, share in (("train", count * 5 // 6), ("val", count - count * 5 // 6)):
        for label in range(CLASSES):
            (root / part / f"class-{label}").mkdir(parents=True)
        for number in range(share):
            label = number % CLASSES
            pixels = draw.integers(0, 60, (SIDE, SIDE, 3)) + 19 * label
            Image.fromarray(pixels.astype(np.uint8)).save(root / part / f"class-{label}" / f"{number}.jpg", quality=80)


def start(root: Path, place: Path, *, real: bool) -> warm.Command:
    words = (*WORDS, f"data.root={root}", f"data.cache={place / 'cache'}")
    return warm.Command(command(NAME, *words, runs=place / "runs"), env=environment(), session=True, real=real)


def resume(folder: RunFolder) -> None:
    line = [sys.executable, str(ROOT / "experiments" / f"{NAME}.py"), "--resume", str(folder.path)]
    done = warm.execute(line, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def run_to_the_end(root: Path, place: Path) -> tuple[RunFolder, float]:
    """The run that nobody stops, and the seconds that it takes."""
    began = time.monotonic()
    process = start(root, place, real=False)
    out, err = process.communicate(600)
    assert process.returncode == 0, out + err
    return only(place), time.monotonic() - began


def only(place: Path) -> RunFolder:
    (path,) = (place / "runs").iterdir()
    return RunFolder(path)


def reached(place: Path) -> str:
    """How far a run had come."""
    found = list((place / "runs").glob("*")) if (place / "runs").exists() else []
    if not found:
        return "preparing"
    folder = RunFolder(found[0])
    rows = folder.read_metrics()
    if folder.result.get("state") == "finished":
        return "finished"
    if any("test_loss" in row for row in rows):
        return "evaluated"
    return f"step {max((row['global_step'] for row in rows), default=0)}"


def attempt(root: Path, whole: RunFolder, place: Path, number: signal.Signals, moment: float) -> Trial:
    """Stop a new run after so many seconds, let it go on, and compare its end with the whole run's.

    A failure is recorded, so that no trial costs the others.
    """
    trial = Trial(number, moment)
    process = start(root, place, real=False)
    try:
        stop(process, trial)
        trial.reached = reached(place)
        assert not processes_of(str(place)), "a process outlives the run"
        if trial.reached == "preparing":
            run_to_the_end(root, place)
            assert not list((place / "cache").glob(".imagefolder-*")), "half-written arrays are left"
        else:
            resume(only(place))
        trial.problem = "".join(f"DIFFERENT: {name}" for name in differences(whole, only(place))[:1])
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        trial.problem = f"FAILED: {type(error).__name__}: {lines[-1] if lines else ''}"
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for pid in processes_of(str(place)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return trial


def stop(process: warm.Command, trial: Trial) -> None:
    """Send the signal of a trial at its moment, and wait for the end of the run."""
    time.sleep(trial.moment)
    began = time.monotonic()
    process.send_signal(trial.number)
    out, err = process.communicate(600)
    trial.left, trial.status = time.monotonic() - began, process.returncode
    assert "Traceback" not in err, out + err


def trials(images: int, moments: int, draw: random.Random, scratch: Path) -> list[Trial]:
    """So many trials for each of Ctrl-C and a cluster's notice; the folders of those that fail are kept."""
    root = scratch / "images"
    make_images(root, images)
    whole, seconds = run_to_the_end(root, scratch / "whole")
    found = []
    for n in range(2 * moments):
        place = scratch / f"trial-{n}"
        number = (signal.SIGINT, signal.SIGUSR2)[n % 2]
        found.append(attempt(root, whole, place, number, draw.uniform(0, seconds)))
        print(found[-1].line(), flush=True)
        shutil.rmtree(place / "cache" if found[-1].problem else place, ignore_errors=True)
    shutil.rmtree(root)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--moments", type=int, default=20)
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="moments-"))
    found = trials(given.images, given.moments, open_stream("random moments"), scratch)
    wrong = [trial for trial in found if trial.problem]
    late = [trial for trial in found if trial.left > LEAVES_WITHIN]
    slowest = max((trial.left for trial in found if not math.isnan(trial.left)), default=math.nan)
    told = f"{len(late)} left later than {LEAVES_WITHIN:g} s, the slowest after {slowest:.1f} s"
    print(f"{len(found)} trials: {len(wrong)} different or failed, {told}")
    if wrong:
        print(f"the folders of the failed ones: {scratch}")
    else:
        shutil.rmtree(scratch)
    return int(bool(late or wrong))


if __name__ == "__main__":
    sys.exit(main())
