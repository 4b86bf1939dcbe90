"""A fork of the warm server does what a real process does: exit status, output and run folder are the same."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from tests.harness import warm
from tests.harness.long_runs import ENDLESS, PATIENCE, only_folder, train_long
from tests.harness.processes import ROOT, command, environment

# what differs between two real processes, too: the clock, processes, memory, and what is made of them
BY_CHANCE = {
    "end", "idle_share", "peak_memory", "pid", "pid_started", "rendezvous_seconds", "samples_per_second", "seconds",
    "start", "step_seconds", "time",
}  # fmt: skip
MEASURED = re.compile(
    r"^ +(throughput|idle share|one step) .*|^ +stage \d \|.*\|$|^\d{4}-\d\d-\d\d [\d:,]+", re.MULTILINE
)


def without_chance(value: Any, chance: set[str] = BY_CHANCE) -> Any:
    """A value as it is in every repetition: of what chance decides, only the kind is left."""
    if isinstance(value, dict):
        return {k: kind_of(v) if k in chance else without_chance(v, chance) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_chance(entry, chance) for entry in value]
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def kind_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kind_of(entry) for key, entry in value.items()}
    return [kind_of(entry) for entry in value] if isinstance(value, list) else type(value).__name__


def read(path: Path, runs: Path) -> Any:
    """What a file of a run says without chance and its own place."""
    if path.suffix == ".pt":
        return without_chance(torch.load(path, weights_only=True))
    text = without_place(path.read_text(), runs)
    if path.suffix == ".jsonl":
        return [without_chance(json.loads(line)) for line in text.splitlines()]
    if path.name == "manifest.json":
        return without_chance(json.loads(text), BY_CHANCE | {"sha256"})  # of files that hold seconds
    return without_chance(json.loads(text)) if path.suffix == ".json" else MEASURED.sub("*", text)


def without_place(text: str, runs: Path) -> str:
    for folder in runs.iterdir() if runs.exists() else ():
        text = text.replace(folder.name, "RUN")
    return text.replace(str(runs), "RUNS")


def everything(runs: Path) -> dict[str, Any]:
    """All files of the one run in a folder."""
    path = only_folder(runs).path
    return {str(file.relative_to(path)): read(file, runs) for file in path.rglob("*") if file.is_file()}


def execute_both(argv: Callable[[Path], list[str]], place: Path) -> list[CompletedProcess[str]]:
    """A command as a fork and as a real process; outputs without chance and place."""
    found = []
    for name, real in (("fork", False), ("real", True)):
        done = warm.execute(argv(place / name), env=environment(), timeout=PATIENCE, real=real)
        done.stdout, done.stderr = (
            MEASURED.sub("*", without_place(text, place / name)) for text in (done.stdout, done.stderr)
        )
        found.append(done)
    return found


def test_a_finished_run_leaves_the_same_folder_and_output(tmp_path: Path, quick: tuple[str, ...]) -> None:
    words = (*quick, "steps=12", "microbatches=2")
    fork, real = execute_both(lambda runs: command("mnist_pipeline", *words, runs=runs), tmp_path)
    assert fork.returncode == real.returncode == 0, fork.stderr + real.stderr
    assert fork.stdout.splitlines() == real.stdout.splitlines() and fork.stderr == real.stderr == ""
    left, wanted = everything(tmp_path / "fork"), everything(tmp_path / "real")
    assert left.keys() == wanted.keys() and len([name for name in left if name.endswith(".pt")]) == 8
    assert [name for name in left if left[name] != wanted[name]] == []
    assert len(left["attempts/0001/metrics.jsonl"]) == 13 and left["result.json"]["test_samples"] == 100


@pytest.mark.parametrize(
    ("words", "status"),
    [(("no_such_key=1",), 2), (("--help",), 0)],
    ids=["a user error", "a question"],
)
def test_an_answer_without_a_run_is_the_same(words: tuple[str, ...], status: int, tmp_path: Path) -> None:
    fork, real = execute_both(lambda runs: command("mnist_pipeline", *words, runs=runs), tmp_path)
    assert fork.returncode == real.returncode == status
    assert (fork.stdout, fork.stderr) == (real.stdout, real.stderr)
    assert ("no_such_key" in fork.stderr) == bool(status) and not list(tmp_path.iterdir())


def test_an_uncaught_exception_is_told_the_same(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.harness.ranks", "no_such_case", str(tmp_path)]
    fork, real = execute_both(lambda _: argv, tmp_path)
    assert fork.returncode == real.returncode == 1
    assert fork.stdout == real.stdout == "" and fork.stderr.startswith("Traceback (most recent call last):\n")
    last = fork.stderr.splitlines()[-4:]
    assert last == real.stderr.splitlines()[-4:] and last[-1] == "KeyError: 'no_such_case'"
    assert last[0].startswith(f'  File "{ROOT}/tests/harness/ranks.py", line ')


def test_ctrl_c_in_training_ends_both_with_the_same_words(tmp_path: Path, quick: tuple[str, ...]) -> None:
    found = []
    for name, real in (("fork", False), ("real", True)):
        runs = tmp_path / name
        with train_long("mnist_pipeline", *quick, *ENDLESS, runs=runs, real=real) as process:
            process.send_signal(signal.SIGINT)
            told = "\n--\n".join(without_place(text, runs) for text in process.communicate(PATIENCE))
        last = only_folder(runs).result["last_step"]
        files = [re.sub(r"step-\d+", "step-LAST", file) for file in everything(runs)]
        found.append((process.returncode, re.sub(rf"\bstep {last}\b", "step LAST", told), sorted(files)))
    assert found[0] == found[1]
    assert found[0][0] == 128 + signal.SIGINT and "saved after step LAST" in found[0][1]
