"""Cases of invalid settings and of full or read-only disks: a run in a new folder, and the expected message."""

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
    """A run with a mistake, or on a bad disk.

    In `arguments` and `message_parts`, {folder} is the folder of the case.
    """

    name: str
    arguments: tuple[str, ...]
    """The arguments of the run."""
    message_parts: tuple[str, ...]
    """Parts of the error message, or of the output if the run succeeds."""
    exit_status: int = 2
    prepare_folder: Callable[[Path, Path], None] = lambda folder, cache: None
    """Prepares the folder; the second argument is the cache with the prepared digits."""
    disk_script: str = ""
    """Shell lines that call `run` and may mount a disk at ./disk, such as a full or a read-only one."""
    env: tuple[tuple[str, str], ...] = ()
    uses_digits: bool = True
    """Whether the run trains on the prepared digits."""
    experiment: str = "mnist_pipeline"
    remedy: str = ""
    """Part of another line of a failed run's output."""


def make_file_writer(name: str, text: str) -> Callable[[Path, Path], None]:
    """Return a function that writes a file into the folder of a case."""

    def write_file(folder: Path, cache: Path) -> None:
        (folder / name).write_text(text)

    return write_file


# ---- settings


SETTINGS_CASES = [
    BadInputCase("unknown key", ("epoch=3",), ("unknown key epoch", "did you mean epochs?")),
    BadInputCase("unknown group", ("optm.lr=1",), ("unknown key optm.lr", "did you mean optim.lr?")),
    BadInputCase("elastic stages", ("elastic=true",), ("unknown key elastic", "resumes from its last checkpoint")),
    BadInputCase("wrong type", ("batch=many",), ("batch=many", "int >= 1")),
    BadInputCase("a float for an int", ("batch=1.5",), ("batch=1.5", "int >= 1")),
    BadInputCase("number without end", ("seed=" + "9" * 5000,), ("seed=9", "expected an integer")),
    BadInputCase("not a number", ("optim.lr=nan",), ("optim.lr=nan", "float from 0 to 100")),
    BadInputCase("no such optimizer", ("optim.name=sdg",), ("optim.name=sdg", "sgd, adam, adamw, lars, lamb or FILE")),
    BadInputCase(
        "no file of an optimizer", ("optim.name=no.py:Own",), ("optim.name=no.py:Own", "existing FILE.py:Class")
    ),
    BadInputCase("no file of a decay", ("optim.decay=no.py:f",), ("optim.decay=no.py:f", "existing FILE.py:function")),
    BadInputCase(
        "no such decay", ("optim.decay=sine",), ("optim.decay=sine", "linear, cosine, constant, step or FILE")
    ),
    *(
        BadInputCase(f"{key}=0", (f"{key}=0",), (f"{key}=0: out of range; allowed: int ",))
        for key in ("batch", "stages", "microbatches", "epochs", "eval_batch", "launch.nodes", "stages_per_process")
    ),
    BadInputCase("negative steps", ("steps=-1",), ("steps=-1", "int >= 0")),
    BadInputCase("more stages than layers", ("stages=4",), ("stages=4", "3 layers", "at most 3")),
    BadInputCase("microbatches that do not divide", ("microbatches=5",), ("batch=64", "microbatches=4 or 8")),
    BadInputCase("more microbatches than samples", ("batch=4", "microbatches=8"), ("microbatches=4",)),
    BadInputCase("batch above the set", ("batch=60001", "microbatches=1"), ("60000 training samples",)),
    *(BadInputCase(f"no {key}", (f"{key}=",), (f"{key}= must not be empty",)) for key in ("runs", "data.cache")),
    BadInputCase("huge batch", (f"batch={10**12}",), ("60000 training samples",)),
    BadInputCase("no word", ("--frobnicate",), ("'--frobnicate'", "usage")),
    BadInputCase("control characters", ("'runs=a\nb'",), ("runs=", "control characters")),
    BadInputCase("project that W&B rejects", ("wandb.project=a/b",), ("wandb.project=a/b", "128")),
    BadInputCase("long name", (f"run.name={'x' * 65}",), ("run.name=x", "65 characters are too many; use at most 64")),
    BadInputCase("long notes", (f"run.notes={'x' * 1001}",), ("1001 characters are too many; use at most 1000",)),
    BadInputCase("no such norm", ("log.gradient_norm=yes",), ("log.gradient_norm=yes", "auto | true | false")),
    BadInputCase("empty tag", ("wandb.tags=[a,,b]",), ("wandb.tags", "1 to 64")),
    BadInputCase("no such --config", ("--config=nowhere.yaml",), ("nowhere.yaml", "configuration file not found")),
    BadInputCase("--config is a folder", ("--config=/",), ("/: cannot be read",)),
    BadInputCase(
        "WANDB_MODE unknown",
        (),
        ("auto, online, offline, disabled, got sometimes",),
        env=(("WANDB_MODE", "sometimes"),),
    ),
]


def list_single_settings() -> list[str]:
    """Return the setting of each case that has only one argument, `key=value`."""
    settings = []
    for case in SETTINGS_CASES:
        if len(case.arguments) == 1 and re.fullmatch(r"[a-z_.]+=.*", case.arguments[0]):
            settings.append(case.arguments[0])
    return settings


OTHER_BAD_CONFIG_LINES = (
    *("data.name=..", "runs=/proc/x", "width=1e9", "schedule=no.py:f", "optim={a: 1}", "seed=[1, 2]"),
    "x: {",  # not YAML
)
BAD_CONFIG_LINES = [*list_single_settings(), *OTHER_BAD_CONFIG_LINES]
"""Invalid lines of a configuration file, most of them `key=value`."""


# ---- disks


FAST_SUITE_CASE_NAMES = ("disk: full while starting",)
"""Names of the disk cases of `make test`. `make test-all` draws cases from the others."""


def write_image_folder(folder: Path, cache: Path) -> None:
    """Create an image folder of four images."""
    for part in ("train", "val"):
        for colour in ("red", "blue"):
            (folder / "images" / part / colour).mkdir(parents=True)
            Image.new("RGB", (9, 9), colour).save(folder / "images" / part / colour / "0.png")


MOUNT_COMMAND = "mount -t tmpfs -o size={size} tmpfs disk"
FILL_DISK_COMMAND = "head -c 32M /dev/zero > disk/zeros 2> /dev/null"
LONG_RUN_SETTINGS = ("width=1024", "batch=512", "epochs=1000", "steps=60", "log.seconds=0.1", "wandb.mode=disabled")
START_TRAINING_LINES = (
    "run > output & started=$!",
    "until cat disk/*/attempts/0001/metrics.jsonl; do sleep 0.1; done > /dev/null 2>&1",
)
LIST_REMAINING_FILES = "find disk -mindepth 1 | sed 's/^/left /'"


def make_disk_case(
    name: str, *arguments: str, message_parts: tuple[str, ...], script_lines: tuple[str, ...]
) -> BadInputCase:
    return BadInputCase(name, arguments, message_parts, disk_script="\n".join(script_lines))


DISK_CASES = [
    BadInputCase(
        "runs: under a file",
        ("runs={folder}/taken/x",),
        ("taken/x", "is a file"),
        prepare_folder=make_file_writer("taken", ""),
    ),
    make_disk_case(
        "disk: full",
        "runs=disk/runs",
        message_parts=("cannot write disk/runs", "disk is full"),
        script_lines=(
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
        message_parts=("cannot write disk/mnist_pipeline-", "disk is full"),
        script_lines=(MOUNT_COMMAND.format(size="64k"), "run", LIST_REMAINING_FILES),
    ),
    dataclasses.replace(
        make_disk_case(
            "disk: full from the middle of training on",
            "runs=disk",
            *LONG_RUN_SETTINGS,
            "checkpoint.every_steps=20",
            message_parts=("metrics.jsonl", "disk is full"),
            script_lines=(
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
            message_parts=("metrics are buffered in memory", "rows 60"),
            script_lines=(
                MOUNT_COMMAND.format(size="24M"),
                *START_TRAINING_LINES,
                FILL_DISK_COMMAND,
                "until grep -q WARNING disk/*/attempts/0001/metrics.jsonl output; do sleep 0.1; done 2> /dev/null",
                "rm disk/zeros",
                "wait $started; status=$?; cat output; mkdir -p runs; cp -r disk/* runs",
                "echo rows $(grep -c '\"loss\"' disk/*/attempts/0001/metrics.jsonl)",
            ),
        ),
        exit_status=0,
    ),
    dataclasses.replace(
        make_disk_case(
            "disk: files of a limited size",
            *("runs=runs", "checkpoint.every_steps=1"),
            message_parts=("could not be saved: rank 0 on ", "File too large", "raise ulimit -f"),
            script_lines=("ulimit -f 100", "run; rm -r runs"),
        ),
        remedy="to restart from step 0: make exp RESUME=",
    ),
    make_disk_case(
        "disk: full while preparing",
        "data.cache=disk/cache",
        message_parts=("cannot write disk/cache", "free up space"),
        script_lines=(
            MOUNT_COMMAND.format(size="1M"),
            "run",
            f"{LIST_REMAINING_FILES} | grep -v -e 'cache$' -e 'lock$'",
        ),
    ),
    dataclasses.replace(
        make_disk_case(
            "disk: too small for an image folder",
            *("data.name=imagefolder", "data.root=images", "data.cache=disk/cache", "data.image_size=1024"),
            message_parts=(
                "4 images in images need 13 MB in disk/cache",
                "1 MB are free; lower data.image_size",
                "data.cache",
            ),
            script_lines=(
                MOUNT_COMMAND.format(size="1M"),
                "run",
                f"{LIST_REMAINING_FILES} | grep -v -e 'cache$' -e 'lock$'",
            ),
        ),
        prepare_folder=write_image_folder,
        experiment="ddp_multinode",
    ),
    make_disk_case(
        "disk: read-only",
        "runs=disk/runs",
        message_parts=("cannot write disk/runs", "disk is read-only"),
        script_lines=(MOUNT_COMMAND.format(size="64k") + " -o ro", "run"),
    ),
]


@functools.cache
def find_namespace_command() -> tuple[list[str], str]:
    """Return a command that executes a program in a new mount namespace, or an error message if none works."""
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


def execute_case(case: BadInputCase, folder: Path, cache: Path) -> FinishedRun:
    """Prepare the folder of a case and execute the run until it ends."""
    case.prepare_folder(folder, cache)
    (folder / "disk").mkdir()
    arguments = [f"runs={folder}/runs", "data.test_limit=1000", "epochs=1", "steps=5"]
    if case.uses_digits:
        arguments += [f"data.cache={cache}", "data.name=digits"]
    arguments += [argument.replace("{folder}", str(folder)) for argument in case.arguments]
    command = [sys.executable, str(ROOT / "experiments" / f"{case.experiment}.py"), *arguments]
    cwd = ROOT
    if case.disk_script:
        run_function = f"run() {{ {shlex.join(command)}; status=$?; return $status; }}"
        command = [*find_namespace_command()[0], "sh", "-c", f"{run_function}\n{case.disk_script}\nexit $status\n"]
        cwd = folder
    env = make_environment(HOME=str(folder / "home"), **dict(case.env))
    process = execution.execute_command(command, cwd=cwd, env=env, timeout=200)
    return FinishedRun(process.returncode, process.stdout, process.stderr, folder / "runs")


def check_case(case: BadInputCase, folder: Path, cache: Path) -> None:
    """Execute a case. Check the message and the exit status, and that no file or process is left."""
    if case.disk_script and find_namespace_command()[1]:
        pytest.skip(f"NOT TESTED, no mount namespace can be created: {find_namespace_command()[1]}")
    process = execute_case(case, folder, cache)
    output = process.stdout + process.stderr
    lines = output.splitlines()
    assert "Traceback" not in output, output
    assert process.returncode == case.exit_status, output
    assert not find_processes(str(folder))
    assert case.remedy in output, output
    assert output.count("WARNING: ") <= 1, output

    message = output
    if case.exit_status:
        (message,) = [line for line in lines if line.startswith("error: ")]
        assert not [line for line in lines if line.startswith("left ")], output  # printed by LIST_REMAINING_FILES
        assert not list(process.runs.glob("*"))
    else:
        assert process.folder.result["state"] == "finished"
    for part in case.message_parts:
        assert part.replace("{folder}", str(folder)) in message, message
