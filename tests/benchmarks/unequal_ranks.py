"""What shards that follow the ranks gain: two ranks on a core each, one of which a spinning process shares."""

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
from tests.benchmarks.records import Row, Table, at_least, at_most

BATCH = 128
SETTINGS = (f"batch={BATCH}", "data.name=digits", "optim.base_batch=0", "data.test_limit=10", "steps=60")
BEGINS = 25  # the step before which a program begins in mid-run, in the last side
FEWER = 0.8  # of the samples of rank 0: no noise, but what the other rank has once the disturbance is answered
ANSWERED = "steps until a disturbance is answered"
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() == int(sys.argv[2]): pass"


class Spinning:
    """A process that spins on this rank's core until the end of the block, from a step on; 0 is before the first."""

    def __init__(self, core: int, begins: int | None) -> None:
        self.core, self.begins = core, begins
        self.process: subprocess.Popen[bytes] | None = None

    def reach(self, step: int) -> None:
        if step == self.begins:
            words = [sys.executable, "-c", SPIN, str(self.core), str(os.getpid())]
            self.process = subprocess.Popen(words)

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

    def steps(self, *given: Any, **options: Any) -> Iterator[Step]:
        for step in super().steps(*given, **options):
            self.spinning.reach(step.number)
            yield step


def train(shards: str, begins: int | None, world: World, prepared: PreparedDataset, scratch: Path) -> float:
    """Train as the script does, on one core; the seconds of a step, or the steps until rank 1 has clearly less."""
    core = sorted(os.sched_getaffinity(0))[world.rank % len(os.sched_getaffinity(0))]
    cfg = config.load_config(Config, [*QUIET, *SETTINGS, f"shards={shards}", f"runs={scratch}"], {})
    folder = RunFolder.create(scratch, "ddp_multinode", format_yaml(cfg)).claim_attempt() if world.is_main else None
    path = Path(world.broadcast(str(folder.path) if folder else None))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    torch.manual_seed(seeds.derive_seed(cfg.seed, "init"))
    run = DisturbedRun(cfg, RunFolder(path, 1), Ranks(world), prepared)
    try:
        with Spinning(core, begins if world.rank == 1 else None) as run.spinning, contextlib.redirect_stdout(None):
            ddp_multinode.main(cfg, run)
    finally:
        run.close()
        os.sched_setaffinity(0, allowed)
    if not begins:
        return run.compute_step_seconds()
    auto_shards = run.find_hook(AutoShards)
    assert auto_shards is not None
    answers = [step for step, (first, second) in auto_shards.history if step > begins and second < FEWER * first]
    return float(answers[0] - begins) if answers else float(cfg.steps)


def sides(scratch: Path) -> list[Team]:
    prepared = prepare.prepare_dataset(config.load_config(Config, [*QUIET, *SETTINGS], {}).data)
    plan = {
        "equal, quiet": ("equal", None),
        "auto, quiet": ("auto", None),
        "equal, shared core": ("equal", 0),
        "auto, shared core": ("auto", 0),
        ANSWERED: ("auto", BEGINS),
    }

    def make(world: World) -> dict[str, Side]:
        return {name: partial(train, *how, world, prepared, scratch) for name, how in plan.items()}

    return [Team(2, 1, make)]


def table(taken: Samples) -> Table:
    rows = [Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values if side != ANSWERED]
    return Table(
        ("measured", "value"),
        [
            *rows,
            at_least("equal / auto, shared core", taken.ratio("equal, shared core", "auto, shared core"), 1.35),
            at_most("auto / equal, quiet", taken.ratio("auto, quiet", "equal, quiet"), 1.02),
            at_most(ANSWERED, taken.number(ANSWERED), 30),
        ],
    )


PART = Part(
    "ddp_multinode/shards",
    f"two ranks with equal shards and with shards=auto, batch {BATCH}, one core shared with a spinning process",
    sides,
    table,
    facts={"threads": "1 a process", "batch": BATCH},
)
