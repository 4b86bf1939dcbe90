"""Runs that are cut off and go on: what the tests of resuming share."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from common.checkpoint import storage
from common.runs.folder import RunFolder
from common.system.exit_status import EXIT_RESUMABLE
from tests.harness import warm
from tests.harness.chance import open_stream
from tests.harness.long_runs import only_folder, train_long
from tests.harness.processes import PATIENCE, Done, environment, wait_until
from tests.harness.registry import Entry
from tests.harness.shared import run_once
from tests.harness.warm import ROOT

STEPS = 30  # of a run with the settings of the fixture `quick`, which saves after each third
ALONE = "launch.threads=1"  # several threads of one process wait for each other, and burn what another test needs


def whole_run(factory: pytest.TempPathFactory, quick: tuple[str, ...], entry: Entry, ranks: int) -> Done:
    """The run of so many processes that was never cut off, made once for all tests; none may write into its folder."""
    name = f"whole-{entry.name}-{ranks}"
    done = run_once(factory, name, entry.name, *quick, *entry.spread(ranks), "data.block=2", ALONE)
    assert done.status == 0, done.err
    return done


def cut_off(folder: RunFolder, step: int, place: Path) -> RunFolder:
    """A copy of a run as it would lie there had it been killed a little after `step`, the last one that was saved."""
    shutil.copytree(folder.path, place / folder.path.name)
    copy = RunFolder(place / folder.path.name)
    (copy.path / "result.json").unlink()
    attempt = copy.list_attempts()[-1]
    begun = attempt.parent_record[1] if attempt.parent_record else 0
    for checkpoint in storage.list_checkpoints(attempt):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    for pointer in ("latest", "best"):
        name = storage.read_pointer_file(attempt, pointer)
        if name is not None and int(name.removeprefix("step-")) > step:
            (storage.get_checkpoints_dir(attempt) / pointer).unlink()
    rows = attempt.metrics_file.read_text().splitlines(keepends=True)
    attempt.metrics_file.write_text("".join(rows[: step - begun + 2]) + '{"global_step": 99, "lo')
    return copy


def resume(
    entry: Entry, folder: RunFolder, *words: str, careless: str = "", real: bool = False
) -> CompletedProcess[str]:
    """Go on with a run; `careless` names the protection that it goes on without."""
    begin = ["-m", "tests.harness.careless", careless] if careless else []
    argv = [sys.executable, *begin, str(ROOT / "experiments" / f"{entry.name}.py"), "--resume", str(folder.path)]
    return warm.execute([*argv, *words], env=environment(), real=real)


def numbers(folder: RunFolder) -> list[tuple[Any, ...]]:
    """All rows but the clock."""
    names = ("global_step", "samples", "loss", "test_loss", "test_accuracy", "test_samples")
    return [tuple(row.get(name) for name in names) for row in folder.read_metrics()]


def trained_steps(folder: RunFolder) -> list[int]:
    return [row["global_step"] for row in folder.read_metrics() if "test_loss" not in row]


def final_state(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's memory after the last step, over all ranks."""
    (attempt, _), *_ = folder.trace_attempts()
    path = storage.list_checkpoints(attempt)[-1].path
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("rank-*.pt")):
        part = torch.load(file, weights_only=True)
        found |= part["model"]
        found |= {f"scaler/{key}": torch.tensor(value) for key, value in part["common"].get("scaler", {}).items()}
        found |= list_moments(part["optimizer"])
        own = part["local"].get("worker", {"vectors": {}, "optimizer": {}})  # of a model that each rank has alone
        alone = own["vectors"] | list_moments(own["optimizer"])
        found |= {f"{file.stem}/{name}": value for name, value in alone.items()}
    return found


def list_moments(optimizer: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state, by parameter and name."""
    values = {f"{name}/{key}": value for name, of in optimizer.items() for key, value in of.items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def differences(one: RunFolder, other: RunFolder) -> list[str]:
    """What is not equal to the bit in the rows, the result and the final state of two runs; empty if all is."""
    found = ["rows"] if numbers(one) != numbers(other) else []
    found += ["test_loss of the result"] if one.result.get("scores") != other.result.get("scores") else []
    a, b = final_state(one), final_state(other)
    both = a.keys() & b.keys()
    return found + [n for n in sorted(a.keys() | b.keys()) if n not in both or not torch.equal(a[n], b[n])]


def check_that_it_goes_on(
    entry: Entry, whole: Done, name: str, place: Path, *words: str, real: bool = False
) -> RunFolder:
    """Cut a run off after one of its saved steps, go on, and compare all of it with the whole run to the bit."""
    (attempt,) = whole.folder.list_attempts()
    step = open_stream(name).choice(storage.list_checkpoints(attempt)[:-1]).step
    folder = cut_off(whole.folder, step, place)
    done = resume(entry, folder, *words, real=real)
    assert done.returncode == 0, f"resumed after step {step}: {done.stderr}"
    assert f"resumed from step {step}" in done.stdout, done.stdout
    assert not (found := differences(folder, whole.folder)), f"resumed after step {step}: {found} differ"
    times = [row["time"] for row in folder.read_metrics()]
    assert times == sorted(times), "the clock of the run goes on, too"
    steps = trained_steps(whole.folder)
    assert trained_steps(folder) == steps == list(range(1, len(steps) + 1)), f"resumed after step {step}"
    return folder


def check_notice_in_evaluation(entry: Entry, digits: tuple[str, ...], runs: Path) -> None:
    """Send a notice to stop in a slow evaluation: the state before it is saved, and it is done again after a resume."""
    slow = (*digits, *entry.smallest, "steps=20", "eval_batch=2", "data.test_limit=0", "checkpoint.grace=120")
    with train_long(entry.name, *slow, runs=runs) as process:
        folder = only_folder(runs)
        wait_until(lambda: len(folder.read_metrics()) == 20, "the evaluation begins")
        process.send_signal(signal.SIGUSR2)
        began = time.monotonic()
        out, err = process.communicate(PATIENCE)
        seconds = time.monotonic() - began
    assert process.returncode == EXIT_RESUMABLE and "stopped on request; checkpoint saved at step 20" in out, out + err
    assert len(folder.read_metrics()) == 20 and [s.step for s in storage.list_resumable_checkpoints(folder)] == [20]
    assert seconds < 60, "far less than the evaluation would have taken"
    done = resume(entry, folder, "data.test_limit=100")
    assert done.returncode == 0, done.stderr
    rows = numbers(folder)
    assert [row[0] for row in rows] == [*range(1, 21), 20] and rows[-1][-1] == 100, "the evaluation is done again"
