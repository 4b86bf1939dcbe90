"""Users' mistakes and full or read-only disks: a command in a new folder, and the expected message."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.harness.commands import execution
from tests.harness.commands.processes import FinishedRun, find_processes, make_environment
from tests.harness.repository import ROOT


@dataclasses.dataclass(frozen=True)
class BadInputCase:
    """A run with a mistake, or on a bad disk. In `words` and `parts`, {place} is the case's folder."""

    name: str
    words: tuple[str, ...]
    """The arguments of the run."""
    parts: tuple[str, ...]
    """Parts of the error message, or of the output if the run succeeds."""
    status: int = 2
    setup: Callable[[Path, Path], None] = lambda place, cache: None
    """Prepares the folder; the second argument is the cache with the prepared digits."""
    disk: str = ""
    """Shell lines that call `run` and may mount a disk at ./disk, such as a full or a read-only one."""
    env: tuple[tuple[str, str], ...] = ()
    fast: bool = True
    """Whether the run trains on the prepared digits."""
    experiment: str = "mnist_pipeline"
    remedy: str = ""
    """Part of another line of a failed run's output."""


def make_file_writer(name: str, text: str) -> Callable[[Path, Path], None]:
    def setup(place: Path, cache: Path) -> None:
        (place / name).write_text(text)

    return setup


# ---- settings


def make_settings_case(name: str, *arguments: str, parts: tuple[str, ...]) -> BadInputCase:
    return BadInputCase(name, arguments, parts)


SETTINGS_CASES = [
    make_settings_case("unknown key", "epoch=3", parts=("unknown key epoch", "did you mean epochs?")),
    make_settings_case("unknown group", "optm.lr=1", parts=("unknown key optm.lr", "did you mean optim.lr?")),
    make_settings_case(
        "elastic stages", "elastic=true", parts=("unknown key elastic", "resumes from its last checkpoint")
    ),
    make_settings_case("wrong type", "batch=many", parts=("batch=many", "int >= 1")),
    make_settings_case("a float for an int", "batch=1.5", parts=("batch=1.5", "int >= 1")),
    make_settings_case("number without end", "seed=" + "9" * 5000, parts=("seed=9", "expected an integer")),
    make_settings_case("not a number", "optim.lr=nan", parts=("optim.lr=nan", "float from 0 to 100")),
    make_settings_case(
        "no such optimizer", "optim.name=sdg", parts=("optim.name=sdg", "sgd, adam, adamw, lars, lamb or FILE")
    ),
    make_settings_case(
        "no file of an optimizer", "optim.name=no.py:Own", parts=("optim.name=no.py:Own", "existing FILE.py:Class")
    ),
    make_settings_case(
        "no file of a decay", "optim.decay=no.py:f", parts=("optim.decay=no.py:f", "existing FILE.py:function")
    ),
    make_settings_case(
        "no such decay", "optim.decay=sine", parts=("optim.decay=sine", "linear, cosine, constant, step or FILE")
    ),
    *(
        make_settings_case(f"{key}=0", f"{key}=0", parts=(f"{key}=0: out of range; allowed: int ",))
        for key in ("batch", "stages", "microbatches", "epochs", "eval_batch", "launch.nodes", "stages_per_process")
    ),
    make_settings_case("negative steps", "steps=-1", parts=("steps=-1", "int >= 0")),
    make_settings_case("more stages than layers", "stages=4", parts=("stages=4", "3 layers", "at most 3")),
    make_settings_case("microbatches that do not divide", "microbatches=5", parts=("batch=64", "microbatches=4 or 8")),
    make_settings_case("more microbatches than samples", "batch=4", "microbatches=8", parts=("microbatches=4",)),
    make_settings_case("batch above the set", "batch=60001", "microbatches=1", parts=("60000 training samples",)),
    *(
        make_settings_case(f"no {key}", f"{key}=", parts=(f"{key}= must not be empty",))
        for key in ("runs", "data.cache")
    ),
    make_settings_case("huge batch", f"batch={10**12}", parts=("60000 training samples",)),
    make_settings_case("no word", "--frobnicate", parts=("'--frobnicate'", "usage")),
    make_settings_case("control characters", "'runs=a\nb'", parts=("runs=", "control characters")),
    make_settings_case("project that W&B rejects", "wandb.project=a/b", parts=("wandb.project=a/b", "128")),
    make_settings_case("empty tag", "wandb.tags=[a,,b]", parts=("wandb.tags", "1 to 64")),
    make_settings_case(
        "no such --config", "--config=nowhere.yaml", parts=("nowhere.yaml", "configuration file not found")
    ),
    make_settings_case("--config is a folder", "--config=/", parts=("/: cannot be read",)),
    dataclasses.replace(
        make_settings_case("WANDB_MODE unknown", parts=("auto, online, offline, disabled, got sometimes",)),
        env=(("WANDB_MODE", "sometimes"),),
    ),
]

BAD_CONFIG_LINES = [
    *(case.words[0] for case in SETTINGS_CASES if len(case.words) == 1 and re.fullmatch(r"[a-z_.]+=.*", case.words[0])),
    *("data.name=..", "runs=/proc/x", "width=1e9", "schedule=no.py:f", "optim={a: 1}", "seed=[1, 2]", "x: {"),
]
"""Lines for a configuration file: `key=value`, and one that is not YAML."""


# ---- disks


FAST_SUITE_CASE_NAMES = ("disk: full while starting", "disk: full for a while")
"""The disks that `make test` tests. `make test-all` tests the others."""


def write_image_folder(place: Path, cache: Path) -> None:
    """Create an image folder of four images."""
    for part in ("train", "val"):
        for colour in ("red", "blue"):
            (place / "images" / part / colour).mkdir(parents=True)
            Image.new("RGB", (9, 9), colour).save(place / "images" / part / colour / "0.png")


MOUNT_COMMAND = "mount -t tmpfs -o size={size} tmpfs disk"
FILL_DISK_COMMAND = "head -c 32M /dev/zero > disk/zeros 2> /dev/null"
LONG_RUN_SETTINGS = ("width=1024", "batch=512", "epochs=1000", "steps=60", "log.seconds=0.1", "wandb.mode=disabled")
START_TRAINING_LINES = (
    "run > output & started=$!",
    "until cat disk/*/attempts/0001/metrics.jsonl; do sleep 0.1; done > /dev/null 2>&1",
)
LIST_REMAINING_FILES = "find disk -mindepth 1 | sed 's/^/left /'"


def make_disk_case(name: str, *arguments: str, parts: tuple[str, ...], shell: tuple[str, ...]) -> BadInputCase:
    return BadInputCase(name, arguments, parts, disk="\n".join(shell))


DISK_CASES = [
    BadInputCase(
        "runs: under a file", ("runs={place}/taken/x",), ("taken/x", "is a file"), setup=make_file_writer("taken", "")
    ),
    make_disk_case(
        "disk: full",
        "runs=disk/runs",
        parts=("cannot write disk/runs", "disk is full"),
        shell=(
            MOUNT_COMMAND.format(size="64k"),
            FILL_DISK_COMMAND,
            "run",
            "rm disk/zeros",
            f"{LIST_REMAINING_FILES} | grep -v 'runs$'",
        ),
    ),
    make_disk_case(
        "disk: full while starting",
        "runs=disk",
        parts=("cannot write disk/mnist_pipeline-", "disk is full"),
        shell=(MOUNT_COMMAND.format(size="64k"), "run", LIST_REMAINING_FILES),
    ),
    dataclasses.replace(
        make_disk_case(
            "disk: full from the middle of training on",
            "runs=disk",
            *LONG_RUN_SETTINGS,
            "checkpoint.every_steps=20",
            parts=("metrics.jsonl", "disk is full"),
            shell=(
                MOUNT_COMMAND.format(size="16M"),
                *START_TRAINING_LINES,
                FILL_DISK_COMMAND,
                "wait $started; status=$?; cat output",
            ),
        ),
        remedy="to restart from step 0: make exp RESUME=",
    ),
    dataclasses.replace(
        make_disk_case(
            "disk: full for a while",
            "runs=disk",
            *LONG_RUN_SETTINGS,
            parts=("metrics are buffered in memory", "rows 60"),
            shell=(
                MOUNT_COMMAND.format(size="24M"),
                *START_TRAINING_LINES,
                FILL_DISK_COMMAND,
                "until grep -q WARNING disk/*/attempts/0001/metrics.jsonl output; do sleep 0.1; done 2> /dev/null",
                "rm disk/zeros",
                "wait $started; status=$?; cat output; mkdir -p runs; cp -r disk/* runs",
                "echo rows $(grep -c '\"loss\"' disk/*/attempts/0001/metrics.jsonl)",
            ),
        ),
        status=0,
    ),
    dataclasses.replace(
        make_disk_case(
            "disk: files of a limited size",
            *("runs=runs", "checkpoint.every_steps=1"),
            parts=("could not be saved: rank 0 on ", "File too large", "raise ulimit -f"),
            shell=("ulimit -f 100", "run; rm -r runs"),
        ),
        remedy="to restart from step 0: make exp RESUME=",
    ),
    make_disk_case(
        "disk: full while preparing",
        "data.cache=disk/cache",
        parts=("cannot write disk/cache", "free up space"),
        shell=(MOUNT_COMMAND.format(size="1M"), "run", f"{LIST_REMAINING_FILES} | grep -v -e 'cache$' -e 'lock$'"),
    ),
    dataclasses.replace(
        make_disk_case(
            "disk: too small for an image folder",
            *("data.name=imagefolder", "data.root=images", "data.cache=disk/cache", "data.image_size=1024"),
            parts=(
                "4 images in images need 13 MB in disk/cache",
                "1 MB are free; lower data.image_size",
                "data.cache",
            ),
            shell=(MOUNT_COMMAND.format(size="1M"), "run", f"{LIST_REMAINING_FILES} | grep -v -e 'cache$' -e 'lock$'"),
        ),
        setup=write_image_folder,
        experiment="ddp_multinode",
    ),
    make_disk_case(
        "disk: read-only",
        "runs=disk/runs",
        parts=("cannot write disk/runs", "disk is read-only"),
        shell=(MOUNT_COMMAND.format(size="64k") + " -o ro", "run"),
    ),
]


@functools.cache
def find_namespace_command() -> tuple[list[str], str]:
    """Return a command that gives a program its own mounts, and an error message if there is none."""
    errors = []
    for command in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        mount = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        try:
            process = subprocess.run(mount, capture_output=True, text=True, check=False)
        except OSError as error:
            return [], str(error)
        if process.returncode == 0:
            return command, ""
        errors.append(process.stderr.strip())
    return [], "; ".join(errors)


def execute_case(case: BadInputCase, place: Path, cache: Path) -> FinishedRun:
    """Prepare the folder of a case and execute the run until it ends."""
    case.setup(place, cache)
    (place / "disk").mkdir()
    arguments = [f"runs={place}/runs", "data.test_limit=1000", "epochs=1", "steps=5"]
    if case.fast:
        arguments += [f"data.cache={cache}", "data.name=digits"]
    arguments += [argument.replace("{place}", str(place)) for argument in case.words]
    command = [sys.executable, str(ROOT / "experiments" / f"{case.experiment}.py"), *arguments]
    cwd = ROOT
    if case.disk:
        run_function = f"run() {{ {shlex.join(command)}; status=$?; return $status; }}"
        command = [*find_namespace_command()[0], "sh", "-c", f"{run_function}\n{case.disk}\nexit $status\n"]
        cwd = place
    env = make_environment(HOME=str(place / "home"), **dict(case.env))
    process = execution.execute_command(command, cwd=cwd, env=env, timeout=200)
    return FinishedRun(process.returncode, process.stdout, process.stderr, place / "runs")


def check_case(case: BadInputCase, place: Path, cache: Path) -> None:
    """Execute a case. Check the message and the exit status, and that no file or process is left."""
    if case.disk and find_namespace_command()[1]:
        pytest.skip(f"NOT TESTED, no mount namespace can be created: {find_namespace_command()[1]}")
    process = execute_case(case, place, cache)
    output = process.out + process.err
    lines = output.splitlines()
    assert "Traceback" not in output, output
    assert process.status == case.status, output
    assert not find_processes(str(place))
    assert case.remedy in output
    assert output.count("WARNING: ") <= 1, output

    message = output
    if case.status:
        (message,) = [line for line in lines if line.startswith("error: ")]
        assert not [line for line in lines if line.startswith("left ")], output  # printed by LIST_LEFT_FILES
        assert not list(process.runs.glob("*"))
    else:
        assert process.folder.result["state"] == "finished"
    for part in case.parts:
        assert part.replace("{place}", str(place)) in message, message
