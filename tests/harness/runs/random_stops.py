"""Stop runs at random moments between the preparation of the data and the final report, and resume them.

    python -m tests.harness.runs.random_stops --images=15000 --moments=20       forty trials, about ten minutes

Each trial prepares a folder of small JPEGs, trains, evaluates and saves. The moment is uniform in the duration of a
complete run, except for its first EARLIEST_STOP_SECONDS. The resumed run must equal an uninterrupted run bit for bit.
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
from tests.harness.commands import execution
from tests.harness.commands.processes import (
    find_processes,
    get_only_run,
    make_environment,
    make_run_command,
    wait_until,
)
from tests.harness.environment.randomness import create_random
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.resuming import find_differences, resume_run

CLASS_COUNT = 10
IMAGE_SIZE = 32  # pixels
EARLIEST_STOP_SECONDS = 0.5
"""Scripts handle Ctrl-C from then on. Earlier, Python itself prints `KeyboardInterrupt`."""
MAX_STOP_SECONDS = 10.0
EXPERIMENT = "ddp_multinode"
RUN_SETTINGS = (
    *("data.name=imagefolder", f"data.image_size={IMAGE_SIZE}", "batch=64", "steps=30", "epochs=1", "optim.warmup=0"),
    *("checkpoint.every_steps=10", "checkpoint.every_seconds=0"),
    *("log.progress=none", "launch.threads=1", "processes_per_node=2"),
)


@dataclasses.dataclass
class Trial:
    """The outcome of one stopped run."""

    signal_number: signal.Signals
    stop_moment: float
    """Seconds from the start to the stop request."""
    stop_seconds: float = math.nan
    """Seconds from the stop request to the end of the processes."""
    exit_status: int | None = None
    """Exit status of the stopped run."""
    progress: str = "?"
    """The phase or the last step when the run was stopped."""
    problem: str = ""
    """The first difference from the complete run, or the error."""

    def format_line(self) -> str:
        """Return a line of the report."""
        progress = f"{self.signal_number.name:<8} after {self.stop_moment:6.2f} s, {self.progress:<24}"
        stop = f"stopped within {self.stop_seconds:5.2f} s, status {self.exit_status}"
        return f"{progress} {stop}  {self.problem or 'equal bit for bit'}"


def write_image_folder(root: Path, count: int) -> None:
    """Write `count` JPEGs of noise around a gray level per class. Five of six are for training."""
    generator = np.random.default_rng(0)
    train_count = count * 5 // 6
    for part, part_count in (("train", train_count), ("val", count - train_count)):
        for label in range(CLASS_COUNT):
            (root / part / f"class-{label}").mkdir(parents=True)
        for number in range(part_count):
            label = number % CLASS_COUNT
            pixels = generator.integers(0, 60, (IMAGE_SIZE, IMAGE_SIZE, 3)) + 19 * label
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(root / part / f"class-{label}" / f"{number}.jpg", quality=80)


def start_run(images: Path, folder: Path) -> execution.Command:
    argv = make_run_command(
        EXPERIMENT, *RUN_SETTINGS, f"data.root={images}", f"data.cache={folder / 'cache'}", runs=folder / "runs"
    )
    return execution.Command(argv, env=make_environment(), new_session=True)


def run_uninterrupted(images: Path, folder: Path) -> tuple[RunFolder, float]:
    """Run without interruption. Return the run folder and the duration in seconds."""
    started = time.monotonic()
    process = start_run(images, folder)
    out, err = process.communicate(600)
    assert process.returncode == 0, out + err
    return get_only_run(folder / "runs"), time.monotonic() - started


def describe_progress(folder: Path) -> str:
    """Return the phase or the last step of a run."""
    paths = list((folder / "runs").glob("*"))  # empty if the folder does not exist
    if not paths:
        return "preparing"
    run = RunFolder(paths[0])
    rows = run.read_metrics()
    if run.result.get("state") == "finished":
        return "finished"
    if any("test_loss" in row for row in rows):
        return "evaluated"
    last_step = max((row["global_step"] for row in rows), default=0)
    return f"step {last_step}"


def execute_trial(
    images: Path, complete_run: RunFolder, folder: Path, signal_number: signal.Signals, stop_moment: float
) -> Trial:
    """Stop a new run after `stop_moment` seconds, resume it, and compare it with the complete run.

    A failure is recorded, so that the next trials are executed.
    """
    trial = Trial(signal_number, stop_moment)
    process = start_run(images, folder)
    try:
        stop_run(process, trial)
        trial.progress = describe_progress(folder)
        # The kernel kills the process that prepares the data when its parent has ended.
        wait_until(lambda: not find_processes(str(folder)), "all processes of the run have ended")
        if trial.progress == "preparing":
            run_uninterrupted(images, folder)
            assert not list((folder / "cache").glob(".imagefolder-*")), "partly written arrays were not deleted"
        else:
            resumed = resume_run(ENTRY_BY_NAME[EXPERIMENT], get_only_run(folder / "runs"), timeout=600)
            assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        for name in find_differences(complete_run, get_only_run(folder / "runs"))[:1]:
            trial.problem = f"DIFFERENT: {name}"
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        last_line = lines[-1] if lines else ""
        trial.problem = f"FAILED: {type(error).__name__}: {last_line}"
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for pid in find_processes(str(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return trial


def stop_run(process: execution.Command, trial: Trial) -> None:
    """Send the signal of a trial at the moment of the trial, and wait until the run has stopped."""
    time.sleep(trial.stop_moment)
    started = time.monotonic()
    process.send_signal(trial.signal_number)
    out, err = process.communicate(600)
    trial.stop_seconds = time.monotonic() - started
    trial.exit_status = process.returncode
    assert "Traceback" not in err, out + err


def execute_trials(image_count: int, moments: int, random_stream: random.Random, scratch: Path) -> list[Trial]:
    """Execute `moments` trials each for Ctrl-C and a cluster's stop request. Folders of failed trials are kept."""
    images = scratch / "images"
    write_image_folder(images, image_count)
    complete_run, seconds = run_uninterrupted(images, scratch / "complete")
    executed = []
    for index in range(2 * moments):
        folder = scratch / f"trial-{index}"
        signal_number = (signal.SIGINT, signal.SIGUSR2)[index % 2]
        stop_moment = random_stream.uniform(EARLIEST_STOP_SECONDS, max(seconds, EARLIEST_STOP_SECONDS))
        trial = execute_trial(images, complete_run, folder, signal_number, stop_moment)
        executed.append(trial)
        print(trial.format_line(), flush=True)
        shutil.rmtree(folder / "cache" if trial.problem else folder, ignore_errors=True)
    shutil.rmtree(images)
    return executed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=15_000)
    parser.add_argument("--moments", type=int, default=20)
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="moments-"))
    executed = execute_trials(arguments.images, arguments.moments, create_random("random moments"), scratch)
    failed = [trial for trial in executed if trial.problem]
    slow = [trial for trial in executed if trial.stop_seconds > MAX_STOP_SECONDS]
    all_seconds = [trial.stop_seconds for trial in executed if not math.isnan(trial.stop_seconds)]
    slowest = max(all_seconds, default=math.nan)
    summary = f"{len(slow)} stopped later than {MAX_STOP_SECONDS:g} s, the slowest after {slowest:.1f} s"
    print(f"{len(executed)} trials: {len(failed)} different or failed, {summary}")
    if failed:
        print(f"folders of failed trials: {scratch}")
    else:
        shutil.rmtree(scratch)
    return 1 if failed or slow else 0


if __name__ == "__main__":
    sys.exit(main())
