"""A run that is started again goes on to the bit as if nothing had happened; in another world, to 1e-9."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common import snapshots
from common.folder import Folder
from tests.harness.processes import ROOT, environment, run
from tests.harness.registry import EXPERIMENTS, Entry

STEPS, EVERY = 30, 3
every = pytest.mark.parametrize("entry", EXPERIMENTS, ids=lambda entry: entry.name)


def interrupted(folder: Folder, step: int, place: Path) -> Folder:
    """A copy of a run as it would lie there had it been killed a little after `step`, the last one that was saved."""
    shutil.copytree(folder.path, place / folder.path.name)
    copy = Folder(place / folder.path.name)
    (copy.path / "result.json").unlink()
    (attempt,) = copy.attempts()
    for snapshot in snapshots.of_attempt(attempt):
        if snapshot.step > step:
            shutil.rmtree(snapshot.path)
    rows = attempt.metrics_file.read_text().splitlines(keepends=True)
    attempt.metrics_file.write_text("".join(rows[: step + 2]) + '{"global_step": 99, "lo')
    return copy


def resume(entry: Entry, folder: Folder, *words: str, script: str = "", timeout: float = 120) -> Any:
    path = [str(ROOT / "experiments" / f"{entry.name}.py")]
    begin = [sys.executable, *(["-c", script, *path] if script else path)]
    return subprocess.run(
        [*begin, "--resume", str(folder.path), *words],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def numbers(folder: Folder) -> list[tuple[Any, ...]]:
    """All rows but the clock."""
    names = ("global_step", "samples", "loss", "test_loss", "test_accuracy", "test_samples")
    return [tuple(row.get(name) for name in names) for row in folder.metrics()]


def final_state(folder: Folder) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's memory after the last step, over all ranks."""
    (attempt, _), *_ = folder.chain()
    path = snapshots.of_attempt(attempt)[-1].path
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("rank-*.pt")):
        part = torch.load(file, weights_only=True)
        found |= part["model"]
        found |= {f"scaler/{key}": torch.tensor(value) for key, value in part["common"].get("scaler", {}).items()}
        memory = {f"{name}/{key}": value for name, of in part["optimizer"].items() for key, value in of.items()}
        found |= {name: value for name, value in memory.items() if isinstance(value, torch.Tensor)}
    return found


def same_numbers(one: Folder, other: Folder) -> bool:
    return numbers(one) == numbers(other) and one.result["test_loss"] == other.result["test_loss"]


def same(one: Folder, other: Folder) -> bool:
    a, b = final_state(one), final_state(other)
    return numbers(one) == numbers(other) and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@every
def test_where_only_the_last_evaluation_is_missing(entry: Entry, tmp_path: Path, quick: tuple[str, ...]) -> None:
    whole = run(entry.name, *quick, *entry.spread(2), runs=tmp_path / "whole")
    folder = interrupted(whole.folder, STEPS, tmp_path / "cut")
    done = resume(entry, folder)
    assert done.returncode == 0, done.stderr
    assert same_numbers(folder, whole.folder)


def test_a_run_whose_settings_are_lost_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "mnist_pipeline-1-2-3").mkdir()
    (tmp_path / "mnist_pipeline-1-2-3" / "config.yaml").touch()
    done = resume(EXPERIMENTS[0], Folder(tmp_path / "mnist_pipeline-1-2-3"))
    assert done.returncode == 2 and "config.yaml is empty" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["batch=40", "seed=5", "optim.name=adam", "data.train_limit=300"])
def test_what_cannot_change(word: str, tmp_path: Path, quick: tuple[str, ...]) -> None:
    (tmp_path / "mnist_pipeline-1-2-3").mkdir()
    told = [sys.executable, str(ROOT / "experiments" / "mnist_pipeline.py"), *quick, "--print-config"]
    text = subprocess.run(told, env=environment(), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (tmp_path / "mnist_pipeline-1-2-3" / "config.yaml").write_text(text)
    done = resume(EXPERIMENTS[0], Folder(tmp_path / "mnist_pipeline-1-2-3"), word)
    assert done.returncode == 2 and f"{word.partition('=')[0]} cannot change when a run goes on" in done.stderr


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@every
def test_resume_is_equal_to_the_bit(entry: Entry, processes: int, tmp_path: Path, quick: tuple[str, ...]) -> None:
    whole = run(entry.name, *quick, *entry.spread(processes), "data.block=2", runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    step = random.randrange(EVERY, STEPS, EVERY)
    folder = interrupted(whole.folder, step, tmp_path / "cut")
    done = resume(entry, folder)
    assert done.returncode == 0, done.stderr
    assert f"goes on after step {step}" in done.stdout
    assert same(folder, whole.folder), f"resumed after step {step}"
    assert folder.result["test_loss"] == whole.folder.result["test_loss"]
    assert [row[0] for row in numbers(folder) if row[2] is not None] == list(range(1, STEPS + 1))


OTHERS = [(entry, words) for entry in EXPERIMENTS for words in entry.others]


@pytest.mark.parametrize(
    ("entry", "words"), OTHERS, ids=lambda value: "-".join(value) if isinstance(value, tuple) else value.name
)
def test_resume_is_equal_to_the_bit_with_other_settings(
    entry: Entry, words: tuple[str, ...], tmp_path: Path, quick: tuple[str, ...]
) -> None:
    whole = run(entry.name, *quick, *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    (attempt,) = whole.folder.attempts()
    step = random.choice(snapshots.of_attempt(attempt)[:-1]).step
    folder = interrupted(whole.folder, step, tmp_path / "cut")
    done = resume(entry, folder)
    assert done.returncode == 0, done.stderr
    assert same(folder, whole.folder), f"resumed after step {step}"


@every
def test_the_best_state_is_kept(entry: Entry, tmp_path: Path, quick: tuple[str, ...]) -> None:
    words = (
        *quick,
        *entry.spread(2),
        "checkpoint.keep=2",
        "checkpoint.best=test_loss",
        "epochs=8",
        "steps=0",
        "optim.lr=0.3",
    )
    whole = run(entry.name, *words, runs=tmp_path)
    assert whole.status == 0, whole.err
    (attempt,) = whole.folder.attempts()
    scores = {row["test_loss"]: row["global_step"] for row in whole.folder.metrics() if "test_loss" in row}
    best = scores[min(scores)]
    assert (attempt.attempt / "checkpoints" / "best").read_text() == f"step-{best:08d}\n"
    steps = [snapshot.step for snapshot in snapshots.of_attempt(attempt)]
    assert steps == sorted({best, *steps[-2:]}) and len(scores) == 8


def test_without_settled_buckets_it_is_not(tmp_path: Path, quick: tuple[str, ...]) -> None:
    """DDP's regrouping of buckets is what the care is for: without it, four processes round otherwise."""
    entry = next(entry for entry in EXPERIMENTS if entry.name == "ddp_multinode")
    careless = (
        "import runpy, sys; from common import hooks; hooks.settle = lambda *_: None; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [*quick, *entry.spread(4), f"runs={tmp_path / 'whole'}"]
    path = str(ROOT / "experiments" / f"{entry.name}.py")
    start = [sys.executable, "-c", careless, path, *words]
    subprocess.run(start, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), check=True, capture_output=True)
    (whole,) = (Folder(path) for path in (tmp_path / "whole").iterdir())
    folder = interrupted(whole, 9, tmp_path / "cut")
    done = resume(entry, folder, script=careless)
    assert done.returncode == 0, done.stderr
    assert not same(folder, whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@every
def test_another_number_of_processes(
    entry: Entry, before: int, after: int, tmp_path: Path, quick: tuple[str, ...]
) -> None:
    words = [*quick, "dtype=float64"]
    whole = run(entry.name, *words, *entry.spread(before), runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    folder = interrupted(whole.folder, 15, tmp_path / "cut")
    done = resume(entry, folder, *entry.spread(after))
    assert done.returncode == 0, done.stderr
    assert f"{before} processes saved this, {after} go on" in done.stdout
    losses = [row["loss"] for row in folder.metrics() if "loss" in row]
    assert losses == pytest.approx(whole.losses, abs=1e-9, rel=0) and len(losses) == STEPS


def test_a_finished_run_says_so(tmp_path: Path, quick: tuple[str, ...]) -> None:
    done = run("mnist_pipeline", *quick, "steps=4", runs=tmp_path)
    again = resume(EXPERIMENTS[0], done.folder)
    assert again.returncode == 0 and "is finished" in again.stdout
    other = resume(EXPERIMENTS[1], done.folder)
    assert other.returncode == 2 and "is a run of mnist_pipeline, not of ddp_multinode" in other.stderr
    assert len(done.folder.attempts()) == 1


def test_make_exp_goes_on_with_the_code_of_the_run(tmp_path: Path, quick: tuple[str, ...]) -> None:
    whole = run("mnist_pipeline", *quick, runs=tmp_path / "whole")
    folder = interrupted(whole.folder, 9, tmp_path / "cut")
    script = folder.path / "code" / "experiments" / "mnist_pipeline.py"
    script.write_text(script.read_text() + "# as it was then\n")
    words = [
        sys.executable,
        "-m",
        "slurm.submit",
        f"--resume={folder.path}",
        "--launch=local",
        "--args=stages=1",
        "--",
        "",
    ]
    told = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert "goes on after step 9" in told.stdout and "2 processes saved this, 1 go on" in told.stdout
    assert "with other settings than the run began with: stages 2 -> 1\n" in told.stdout
    changed = json.loads((folder.attempts()[-1].attempt / "changed.json").read_text())
    assert changed == {"stages": ["2", "1"]}
    assert [row[0] for row in numbers(folder) if row[2] is not None] == list(range(1, STEPS + 1))
    again = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0 and "is finished" in again.stdout


def test_a_loss_that_is_no_number_after_the_last_look(tmp_path: Path, quick: tuple[str, ...]) -> None:
    done = run("mnist_pipeline", *quick, "checkpoint.every_steps=0", "optim.lr=30", "steps=13", runs=tmp_path)
    assert done.status == 2 and "the loss of step" in done.err
    assert done.folder.result["state"] == "failed"


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, quick: tuple[str, ...]) -> None:
    done = run("mnist_pipeline", *quick, "optim.lr=100", "epochs=100", "steps=0", runs=tmp_path)
    assert done.status == 2 and "Traceback" not in done.err
    assert "the loss of step" in done.err and "positions" in done.err and "lower optim.lr" in done.err
    for attempt in done.folder.attempts():
        for snapshot in snapshots.of_attempt(attempt):
            part = torch.load(snapshot.path / "rank-0.pt", weights_only=True)
            assert all(value.isfinite().all() for value in part["model"].values()), snapshot
