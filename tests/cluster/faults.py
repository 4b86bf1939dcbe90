"""Faults on a real SLURM cluster: each run is disturbed once and must end equal to an undisturbed run, to the bit.

    python -m tests.cluster.faults [--rounds=N] [--seed=S] [--only NAME ...] [--elastic] [--list]

A run uses two of three hosts; the third one is spare. ddp_multinode (on a folder of images, two data workers per rank)
and mnist_pipeline alternate; faults of a single experiment are in NAME_faults.py. The step at which a fault strikes is
drawn from a printed seed. The table is printed and written to tests/benchmarks/results/. A command with the same
arguments and seed continues after an interruption, at a commit without uncommitted changes. slurm-wlm and iproute2 are
required, and root for the fault that fills a disk.

With --elastic, faults that do not damage checkpoints disturb runs with elastic=true. These may continue without another
attempt. They are compared in float64 to 1e-9 and have a separate table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import operator
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.checkpoint.storage import CheckpointPath
from common.runs.folder import RunFolder
from tests.cluster import fault_kinds
from tests.cluster.fault_kinds import Fault
from tests.cluster.fault_tables import FaultRecord, Struck, line, table
from tests.cluster.lab import CHECKPOINT_STEPS, STEPS, USUAL_RATE, Lab, Running, laboratory, last_step, time_step_after
from tests.harness.elastic import faulty_runs
from tests.harness.experiments.discovery import import_experiment_modules
from tests.harness.slurm.cluster_site import wait_on_cluster

FAULTS: list[Fault] = list(fault_kinds.FAULTS)
for faults_of_experiment in import_experiment_modules("tests.cluster.{}_faults").values():
    FAULTS += faults_of_experiment.FAULTS
ACTIVE_STATES = ("RUNNING", "COMPLETING")
ELASTIC = ("elastic=true", "elastic.rejoin=100")
FLOAT64 = "dtype=float64"
# faults that damage neither checkpoints nor a starting attempt
ELASTIC_FAULTS = (
    "USR2",
    "scontrol requeue",
    "time limit",
    "kill -9 of rank 0",
    "kill -9 of rank 1",
    "kill -9 of a data worker",
    "a rank stopped permanently",
    "power-off of the batch host",
    "power-off of the other host",
    "both hosts off and on",
    "cable of the batch host cut",
    "cable of the other host cut",
    "a cable cut for 4 s",
    "slurmd killed",
    "slurmctld killed, back after 5 s",
    "disk full for 12 s",
    "W&B host gone",
    "preemption: USR2, then TERM",
)
NO_DISK = "only root can give a run a disk of its own"


# ---- one case


def disturb_run(lab: Lab, fault: Fault, experiment: str, seed: str, *, elastic: bool = False) -> Struck:
    """Disturb one run, and compare its outcome with that of an undisturbed run."""
    chance = random.Random(f"{seed} {fault.name} {experiment}")
    start_time = time.monotonic()
    lab.up(fault.conf)
    reference = lab.reference(experiment, FLOAT64) if elastic else lab.reference(experiment)
    row = Struck(fault.name, experiment, chance.randint(STEPS // 5, STEPS // 2))
    environ = fault.environ(lab)
    settings = (*fault.settings, FLOAT64, *ELASTIC) if elastic else fault.settings
    running = lab.submit(experiment, *settings, own_disk=fault.own_disk, **environ)
    row.folder = str(running.folder.path)
    try:
        running.wait_for_step(row.step)
        if elastic:
            strike_elastic(running, fault, row, chance)
        else:
            strike(running, fault, row, chance)
        running.finish()
        row.starts = len(running.folder.list_attempts())
        if elastic:  # it may continue without another attempt: any number of attempts is correct
            row.problems += faulty_runs.find_metric_differences(running.folder, reference)
        else:
            row.problems += list_problems(running.folder, reference, tracked="WANDB_MODE" in environ)
            if row.starts < fault.starts or (row.starts > 1 and fault.starts == 1):
                row.problems.append(f"{row.starts} attempts")
        state = wait_for_final_state(running)
        if state != "COMPLETED":
            row.problems.append(f"SLURM shows the job as {state}")
        row.equal = not row.problems
    except Exception as error:
        row.problems.append(f"{type(error).__name__}: {error}")
        lab.down()  # its state is unknown; the next run gets a new cluster
    row.total = time.monotonic() - start_time
    return row


def wait_for_final_state(running: Running) -> str:
    """Wait until SLURM knows that the job is over; return its state."""

    def read_final_state() -> str:
        state = running.state()
        return "" if state in ACTIVE_STATES else state

    return str(wait_on_cluster("SLURM knows that the job is over", read_final_state))


def strike(running: Running, fault: Fault, row: Struck, chance: random.Random) -> None:
    """Cause the fault, and measure the times until the run continues."""
    struck = running.newest()
    strike_time = time.monotonic()
    with stopwatch(running, row, strike_time) if fault.starts > 1 else contextlib.nullcontext():
        repair = fault.strike(running, chance)
        if fault.starts > 1:
            wait_on_cluster(
                "a new attempt loads a checkpoint", lambda: has_resumed(running, struck, fault.starts), 150, 0.05
            )
            row.resumed = time.monotonic() - strike_time
    if repair:
        repair()
    running.lab.limit_cables(USUAL_RATE)
    if fault.starts > 1:
        check_repeated_steps(running, fault, row, struck)


def check_repeated_steps(running: Running, fault: Fault, row: Struck, struck: RunFolder) -> None:
    """Record how many steps were repeated, and a problem if there were too few or too many."""
    row.redone = count_repeated_steps(running, struck)
    last = last_step(struck)
    fewest = fault.unusable * CHECKPOINT_STEPS
    if fault.intervals is None:
        fewest = last
        highest = last
    elif fault.notice:
        highest = 0
    else:
        highest = fault.intervals * CHECKPOINT_STEPS
    if not fewest <= row.redone <= highest:
        row.problems.append(f"{row.redone} steps were repeated after step {last}, not {fewest} to {highest}")


def strike_elastic(running: Running, fault: Fault, row: Struck, chance: random.Random) -> None:
    """Cause the fault, and measure the time until the run continues, with or without another attempt."""
    cause_fault = functools.partial(fault.strike, running, chance)
    if fault.starts > 1:
        row.resumed, repair = time_step_after(running, cause_fault)
    else:
        repair = cause_fault()
    if repair:
        repair()
    running.lab.limit_cables(USUAL_RATE)


def has_resumed(running: Running, struck: RunFolder, starts: int) -> bool:
    """Return whether `starts` attempts exist from the struck one on, and the newest has loaded a checkpoint."""
    newest = running.newest()
    return newest.number >= struck.number + starts - 1 and newest.parent_record is not None


def count_repeated_steps(running: Running, struck: RunFolder) -> int:
    """Return the number of steps that were trained again, from the struck attempt on."""
    starting_steps = []
    for attempt in running.folder.list_attempts():
        if attempt.parent_record and attempt.number >= struck.number:
            starting_steps.append((attempt, attempt.parent_record[1]))
    repeated = 0
    for (attempt, first_step), (_, next_step) in pairwise(starting_steps):
        repeated += max(last_step(attempt), first_step) - next_step
    return repeated


@contextlib.contextmanager
def stopwatch(running: Running, row: Struck, strike_time: float) -> Iterator[None]:
    """Record when SLURM no longer shows the job as running, asked by a separate process."""
    script = f'until [ "$(squeue -h -j {running.job} -o %T)" != RUNNING ]; do sleep 0.2; done'
    with subprocess.Popen(running.lab.cluster.build_command(["sh", "-c", script])) as process:

        def wait() -> None:
            process.wait()
            row.detected = time.monotonic() - strike_time

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            process.kill()
            thread.join()


def list_problems(folder: RunFolder, reference: RunFolder, *, tracked: bool = False) -> list[str]:
    """Return how a run differs from the undisturbed one, and what is wrong with its files.

    W&B must have recorded the run once if it is `tracked`.
    """
    if folder.result.get("state") != "finished":
        return [f"the run ended as {folder.result}"]
    rows = folder.read_metrics()
    problems = compare_metrics(rows, reference.read_metrics())
    if [row["global_step"] for row in rows if "loss" in row] != list(range(1, STEPS + 1)):
        problems.append("metrics have gaps or repeats")
    scores = folder.result["scores"]
    for key in ("test_loss", "test_accuracy"):
        if scores[key] != reference.result["scores"][key]:
            problems.append(f"result.json has another {key}")
    different = differences(load_last_checkpoint(folder), load_last_checkpoint(reference))
    problems += [f"the last checkpoint differs in {key}" for key in different[:3]]
    ids = {path.name.rpartition("-")[2] for path in (folder.path / "wandb").glob("*run-*-*")}
    if len(ids) != int(tracked):
        problems.append(f"W&B ids {ids}")
    for file in (folder.path / "submit").glob("*_result.pkl"):
        if is_failure(file):
            problems.append(f"{file.name} is a failure")
    return problems


def compare_metrics(rows: list[dict[str, Any]], expected_rows: list[dict[str, Any]]) -> list[str]:
    """Return the first difference of the losses, and of the evaluations."""
    problems = []
    for keys in (("global_step", "loss"), ("global_step", "test_loss", "test_accuracy")):
        actual = select_columns(rows, keys)
        expected = select_columns(expected_rows, keys)
        if actual != expected:
            problems.append(f"{keys[1]}: {find_first_difference(actual, expected)}")
    return problems


def select_columns(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return the values of `keys` in all rows that have the second key."""
    select = operator.itemgetter(*keys)
    return [select(row) for row in rows if keys[1] in row]


def find_first_difference(actual: list[Any], expected: list[Any]) -> str:
    for actual_row, expected_row in zip(actual, expected, strict=False):
        if actual_row != expected_row:
            return f"{actual_row} instead of {expected_row}"
    return f"{len(actual)} rows instead of {len(expected)}"


def is_failure(file: Path) -> bool:
    """Return whether Submitit stored an error as the result of a process."""
    import pickle

    return bool(pickle.loads(file.read_bytes())[0] != "success")


def load_last_checkpoint(folder: RunFolder) -> list[Any]:
    """Return the content of the checkpoint of the last step, without values that depend on when it was saved.

    A checkpoint that is due after the last step is saved before the last evaluation, any other one during it. The flag
    `unevaluated` differs between the two; a resumed run makes the last evaluation in both cases.
    """
    import torch

    checkpoint = CheckpointPath(folder.trace_attempts()[0][0], STEPS)
    shards = [torch.load(file, weights_only=True) for file in sorted(checkpoint.path.glob("rank-*.pt"))]
    for shard in shards:
        shard.pop("attempt")
        for name in ("seconds", "rows", "wandb", "unevaluated"):
            shard["common"].pop(name, None)
    return shards


def differences(actual: Any, expected: Any, key: str = "") -> list[str]:
    """Return the keys at which two trees of tensors and primitives differ in any bit."""
    import torch

    different = []
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        is_equal = actual.dtype == expected.dtype and torch.equal(actual, expected)
        return [] if is_equal else [key]
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        for name in actual:
            different += differences(actual[name], expected[name], f"{key}/{name}")
        return different
    if isinstance(actual, list | tuple) and type(actual) is type(expected) and len(actual) == len(expected):
        for index, (actual_part, expected_part) in enumerate(zip(actual, expected, strict=True)):
            different += differences(actual_part, expected_part, f"{key}/{index}")
        return different
    return [] if type(actual) is type(expected) and actual == expected else [key]


# ---- all faults


def plan_cases(rounds: int, names: list[str], *, elastic: bool = False) -> list[tuple[int, Fault, str]]:
    """Return round, fault and experiment of each case. The experiments alternate, in the next round the other way."""
    experiments = ("ddp_multinode", "ddp_multinode" if elastic else "mnist_pipeline")
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    if elastic:
        faults = [fault for fault in faults if fault.name in ELASTIC_FAULTS]
    cases = []
    for number in range(rounds):
        for index, fault in enumerate(faults):
            cases.append((number, fault, fault.only or experiments[(number + index) % 2]))
    return cases


def leave_out_untestable(cases: list[tuple[int, Fault, str]]) -> list[tuple[int, Fault, str]]:
    """Return the cases that this user can test, and print the faults of the other ones."""
    untestable = {fault.name for _, fault, _ in cases if fault.own_disk and os.getuid()}
    for name in sorted(untestable):
        print(f"NOT TESTED: {name}: {NO_DISK}", flush=True)
    return [case for case in cases if case[1].name not in untestable]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.faults", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**6)))
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--elastic", action="store_true", help="strike runs with elastic=true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(fault.name for fault in FAULTS))
        return 0
    print(f"seed {options.seed}", flush=True)
    record = FaultRecord(options.seed, options.rounds, tuple(options.only), options.elastic)
    rows = record.load()
    cases = leave_out_untestable(plan_cases(options.rounds, options.only, elastic=options.elastic))
    with laboratory() as lab:
        for number, fault, experiment in cases[len(rows) :]:
            rows.append(disturb_run(lab, fault, experiment, f"{options.seed} {number}", elastic=options.elastic))
            print(f"{rows[-1]}", flush=True)
            record.save(rows)
        print(table([line(row) for row in rows]))
        if len(rows) != len(cases) or not all(row.equal for row in rows):
            raise SystemExit(1)  # the lab keeps its folder
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
