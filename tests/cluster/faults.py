"""Faults on a real SLURM cluster: each run is disturbed once and must end as if nothing had happened, to the bit.

    python -m tests.cluster.faults [--rounds=N] [--seed=S] [--only NAME ...] [--skip=N] [--elastic] [--list]

Three hosts, two of them used, one to spare. ddp_multinode (on a folder of images, two data workers a rank) and
mnist_pipeline take turns; faults of one experiment alone are in NAME_faults.py. The step at which a fault strikes is
drawn from a printed seed. The table goes to the screen and to
tests/benchmarks/results/. Needs slurm-wlm and iproute2, and root for the fault that fills a disk. With --elastic the
faults that leave checkpoints alone strike runs with elastic=true, which may go on in flight and are compared in float64
to 1e-9; theirs is a table of its own.
"""

from __future__ import annotations

import argparse
import contextlib
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
from tests.cluster.fault_kinds import Fault, Mend
from tests.cluster.fault_tables import Struck, line, save, table
from tests.cluster.lab import EVERY, STEPS, USUAL, Lab, Running, laboratory, last_step, time_step_after
from tests.harness import elastic_runs as near
from tests.harness.declared import import_of_experiments
from tests.harness.site import until

OF_EXPERIMENTS = import_of_experiments("tests.cluster.{}_faults").values()
FAULTS: list[Fault] = [*fault_kinds.FAULTS, *(fault for module in OF_EXPERIMENTS for fault in module.FAULTS)]
GOING_ON = ("RUNNING", "COMPLETING")
ELASTIC, FLOAT64 = ("elastic=true", "elastic.rejoin=100"), "dtype=float64"
IN_FLIGHT = (  # what strikes neither checkpoints nor a new start
    *("USR2", "scontrol requeue", "time limit", "kill -9 of rank 0", "kill -9 of rank 1", "kill -9 of a data worker"),
    *("a rank stopped for ever", "power-off of the batch host", "power-off of the other host", "both hosts off and on"),
    *("cable of the batch host cut", "cable of the other host cut", "a cable cut for 4 s", "slurmd killed"),
    *("slurmctld killed, back after 5 s", "disk full for 12 s", "W&B host gone", "preemption: USR2, then TERM"),
)
NO_DISK = "only root can give a run a disk of its own"


# ---- one case


def suffer(lab: Lab, fault: Fault, experiment: str, seed: str, *, elastic: bool = False) -> Struck:
    """Disturb one run; what it ends with is compared with an undisturbed one."""
    chance = random.Random(f"{seed} {fault.name} {experiment}")
    began = time.monotonic()
    lab.up(fault.conf)
    reference = lab.reference(experiment, *([FLOAT64] if elastic else []))
    row = Struck(fault.name, experiment, chance.randint(STEPS // 5, STEPS // 2))
    environ = fault.environ(lab)
    words = (*fault.words, *((FLOAT64, *ELASTIC) if elastic else ()))
    running = lab.submit(experiment, *words, own_disk=fault.own_disk, **environ)
    row.folder = str(running.folder.path)
    try:
        running.wait_for_step(row.step)
        if elastic:
            watch_elastic(running, fault, row, chance)
        else:
            watch(running, fault, row, chance)
        running.finish()
        row.starts = len(running.folder.list_attempts())
        if elastic:  # it may go on in flight: any number of starts is right
            row.problems += near.differences(running.folder, reference)
        else:
            row.problems += problems(running.folder, reference, followed="WANDB_MODE" in environ)
            if row.starts < fault.starts or (row.starts > 1 and fault.starts == 1):
                row.problems.append(f"{row.starts} starts")
        ended = until("SLURM knows that the job is over", lambda: (shown := running.state()) not in GOING_ON and shown)
        if ended != "COMPLETED":
            row.problems.append(f"SLURM shows the job as {ended}")
        row.equal = not row.problems
    except Exception as error:
        row.problems.append(f"{type(error).__name__}: {error}")
        lab.down()  # whatever state it is in, the next run gets a fresh one
    row.total = time.monotonic() - began
    return row


def watch(running: Running, fault: Fault, row: Struck, chance: random.Random) -> None:
    """Strike, and take the times until the run goes on."""
    old, start = running.newest(), time.monotonic()
    with stopwatch(running, row, start) if fault.starts > 1 else contextlib.nullcontext():
        mend = fault.strike(running, chance)
        if fault.starts > 1:
            until("a new start has loaded a checkpoint", lambda: resumed(running, old, fault.starts), 150, 0.05)
            row.resumed = time.monotonic() - start
    if mend:
        mend()
    running.lab.limit_cables(USUAL)
    if fault.starts == 1:
        return
    row.redone, reached = redone(running, old), last_step(old)
    least, most = fault.useless * EVERY, 0 if fault.notice else (fault.intervals or 0) * EVERY
    if fault.intervals is None:
        least = most = reached
    if not least <= row.redone <= most:
        row.problems.append(f"{row.redone} steps were done again after step {reached}, not {least} to {most}")


def watch_elastic(running: Running, fault: Fault, row: Struck, chance: random.Random) -> None:
    """Strike, and take the time until the run goes on, in flight or by a new start."""

    def strike() -> Mend | None:
        return fault.strike(running, chance)

    if fault.starts > 1:
        row.resumed, mend = time_step_after(running, strike)
    else:
        mend = strike()
    if mend:
        mend()
    running.lab.limit_cables(USUAL)


def resumed(running: Running, old: RunFolder, starts: int) -> bool:
    """Whether so many starts were made from the struck one on, and the newest knows where it goes on."""
    newest = running.newest()
    return newest.number >= old.number + starts - 1 and newest.parent_record is not None


def redone(running: Running, old: RunFolder) -> int:
    """Steps that were trained again, from the struck start on."""
    places = [
        (attempt, attempt.parent_record[1]) for attempt in running.folder.list_attempts() if attempt.parent_record
    ]
    counted = [(attempt, step) for attempt, step in places if attempt.number >= old.number]
    return sum(max(last_step(one), step) - after for (one, step), (_, after) in pairwise(counted))


@contextlib.contextmanager
def stopwatch(running: Running, row: Struck, start: float) -> Iterator[None]:
    """Meanwhile a process of its own asks SLURM when the job is no longer shown as running."""
    script = f'until [ "$(squeue -h -j {running.job} -o %T)" != RUNNING ]; do sleep 0.2; done'
    with subprocess.Popen(running.lab.cluster.build_command(["sh", "-c", script])) as process:

        def wait() -> None:
            process.wait()
            row.detected = time.monotonic() - start

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            process.kill()
            thread.join()


def problems(folder: RunFolder, reference: RunFolder, *, followed: bool = False) -> list[str]:
    """In what a run differs from the undisturbed one, and what it left behind, also in W&B if that `followed` it."""
    found = []
    if folder.result.get("state") != "finished":
        return [f"it ended as {folder.result}"]
    rows, right = folder.read_metrics(), reference.read_metrics()
    for name, keys in (
        ("loss", ("global_step", "loss")),
        ("evaluation", ("global_step", "test_loss", "test_accuracy")),
    ):
        columns = [[tuple(r[k] for k in keys) for r in table if keys[1] in r] for table in (rows, right)]
        if columns[0] != columns[1]:
            found.append(f"{name}: {first_difference(*columns)}")
    if [row["global_step"] for row in rows if "loss" in row] != list(range(1, STEPS + 1)):
        found.append("metrics have gaps or repeats")
    if any(folder.result["scores"][key] != reference.result["scores"][key] for key in ("test_loss", "test_accuracy")):
        found.append("result.json has another evaluation")
    found += [f"the last checkpoint differs in {place}" for place in differences(final(folder), final(reference))[:3]]
    ids = {path.name.rpartition("-")[2] for path in (folder.path / "wandb").glob("*run-*-*")}
    if len(ids) != followed:
        found.append(f"W&B ids {ids}")
    found += [f"{file.name} is a failure" for file in (folder.path / "submit").glob("*_result.pkl") if is_failure(file)]
    return found


def first_difference(one: list[Any], other: list[Any]) -> str:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a} instead of {b}"
    return f"{len(one)} rows instead of {len(other)}"


def is_failure(file: Path) -> bool:
    """Whether Submitit kept an error as a process's result."""
    import pickle

    return bool(pickle.loads(file.read_bytes())[0] != "success")


def final(folder: RunFolder) -> list[Any]:
    """Return the content of the checkpoint of the last step, without values that depend on when it was saved.

    A checkpoint that is due after the last step is saved before the last evaluation, any other one during it. The flag
    `unevaluated` differs between the two; a resumed run makes the last evaluation in both cases.
    """
    import torch

    place = CheckpointPath(folder.trace_attempts()[0][0], STEPS)
    parts = [torch.load(file, weights_only=True) for file in sorted(place.path.glob("rank-*.pt"))]
    for part in parts:
        part.pop("attempt")
        for name in ("seconds", "rows", "wandb", "unevaluated"):
            part["common"].pop(name, None)
    return parts


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two trees of tensors and primitives differ in any bit."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [place]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, pair in pairs for found in differences(*pair, f"{place}/{i}")]
    return [] if type(one) is type(other) and one == other else [place]


# ---- all faults


def plan(rounds: int, names: list[str], *, elastic: bool = False) -> list[tuple[int, Fault, str]]:
    """Every fault in every round, the experiments taking turns; the next round the other way round."""
    both = ("ddp_multinode", "ddp_multinode" if elastic else "mnist_pipeline")
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    if elastic:
        chosen = [fault for fault in chosen if fault.name in IN_FLIGHT]
    return [(n, fault, fault.only or both[(n + i) % 2]) for n in range(rounds) for i, fault in enumerate(chosen)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.faults", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**6)))
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="go on with a plan whose first N were done")
    parser.add_argument("--elastic", action="store_true", help="strike runs with elastic=true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(fault.name for fault in FAULTS))
        return 0
    print(f"seed {given.seed}", flush=True)
    rows: list[Struck] = []
    with contextlib.suppress(AssertionError), laboratory() as lab:
        for number, fault, experiment in plan(given.rounds, given.only, elastic=given.elastic)[given.skip :]:
            if fault.own_disk and os.getuid():
                print(f"NOT TESTED: {fault.name}: {NO_DISK}", flush=True)
                continue
            rows.append(suffer(lab, fault, experiment, f"{given.seed} {number}", elastic=given.elastic))
            print(f"{rows[-1]}", flush=True)
            save(rows, given.seed, given.rounds, elastic=given.elastic)
        assert all(row.equal for row in rows)
    print(table([line(row) for row in rows]))
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
