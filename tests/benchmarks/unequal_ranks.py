"""Gains of shards that follow the ranks: two ranks on a core each, one of which a spinning process shares."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.config import config
from common.config.config import format_yaml
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.system import seeds
from common.techniques.data_parallel.shards import AutoShards
from common.training.loop import Step
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode
from tests.benchmarks.measure import Samples, Side, Team
from tests.benchmarks.parts import QUIET, Part
from tests.benchmarks.records import Table, at_least, at_most, list_step_times, make_value_table

BATCH = 128
SETTINGS = (f"batch={BATCH}", "data.name=digits", "optim.base_batch=0", "data.test_limit=10", "steps=60")
STARTS = 25  # the step before which a program starts in mid-run, in the last side
FEWER = 0.8  # of the samples of rank 0: no noise, but rank 1's shard once the run has adapted to the disturbance
ANSWERED = "steps until the shards are changed after a disturbance"
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() == int(sys.argv[2]): pass"


class Spinning:
    """A process that spins on this rank's core until the end of the block, from a step on; 0 is before the first."""

    def __init__(self, core: int, first_step: int | None) -> None:
        self.core = core
        self.first_step = first_step
        self.process: subprocess.Popen[bytes] | None = None

    def reach(self, step: int) -> None:
        """Start the process if this is its step."""
        if step == self.first_step:
            command = [sys.executable, "-c", SPIN, str(self.core), str(os.getpid())]
            self.process = subprocess.Popen(command)

    def __enter__(self) -> Spinning:
        self.reach(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class DisturbedRun(Run):
    """A run beside which a process may begin to spin."""

    spinning: Spinning

    def steps(self, *arguments: Any, **options: Any) -> Iterator[Step]:
        for step in super().steps(*arguments, **options):
            self.spinning.reach(step.number)
            yield step


def count_answer_steps(run: Run, first_step: int) -> float:
    """Return the steps from a disturbance until rank 1 has clearly fewer samples."""
    auto_shards = run.find_hook(AutoShards)
    assert auto_shards is not None
    for step, (shard, disturbed_shard) in auto_shards.history:
        if step > first_step and disturbed_shard < FEWER * shard:
            return float(step - first_step)
    return float(run.cfg.steps)


def train(shards: str, first_step: int | None, world: World, prepared: PreparedDataset, scratch: Path) -> float:
    """Train as the script does, on one core; return the seconds of a step, or the steps until the run has adapted."""
    allowed = os.sched_getaffinity(0)
    core = sorted(allowed)[world.rank % len(allowed)]
    cfg = config.load_config(Config, [*QUIET, *SETTINGS, f"shards={shards}", f"runs={scratch}"], {})
    folder = RunFolder.create(scratch, "ddp_multinode", format_yaml(cfg)).claim_attempt() if world.is_main else None
    path = Path(world.broadcast(str(folder.path) if folder else None))
    os.sched_setaffinity(0, {core})
    torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
    run = DisturbedRun(cfg, RunFolder(path, 1), Ranks(world), prepared)
    try:
        with Spinning(core, first_step if world.rank == 1 else None) as run.spinning, contextlib.redirect_stdout(None):
            ddp_multinode.main(cfg, run)
    finally:
        run.close()
        os.sched_setaffinity(0, allowed)
    return count_answer_steps(run, first_step) if first_step else run.compute_step_seconds()


def sides(scratch: Path) -> list[Team]:
    prepared = prepare.prepare_dataset(config.load_config(Config, [*QUIET, *SETTINGS], {}).data)
    plan = {
        "equal, quiet": ("equal", None),
        "auto, quiet": ("auto", None),
        "equal, shared core": ("equal", 0),
        "auto, shared core": ("auto", 0),
        ANSWERED: ("auto", STARTS),
    }

    def make(world: World) -> dict[str, Side]:
        trainings: dict[str, Side] = {}
        for name, (shards, first_step) in plan.items():
            trainings[name] = partial(train, shards, first_step, world, prepared, scratch)
        return trainings

    return [Team(2, 1, make)]


def table(samples: Samples) -> Table:
    rows = [row for row in list_step_times(samples) if ANSWERED not in row.what]
    gain = samples.ratio("equal, shared core", "auto, shared core")
    rows.append(at_least("equal / auto, shared core", gain, 1.35))
    rows.append(at_most("auto / equal, quiet", samples.ratio("auto, quiet", "equal, quiet"), 1.02))
    rows.append(at_most(ANSWERED, samples.number(ANSWERED), 30))
    return make_value_table(rows)


PART = Part(
    "ddp_multinode/shards",
    f"two ranks with equal shards and with shards=auto, batch {BATCH}, one core shared with a spinning process",
    sides,
    table,
    facts=("2 processes with 1 thread each", f"batch size {BATCH}"),
)
