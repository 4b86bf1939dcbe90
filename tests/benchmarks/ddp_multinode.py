"""What data parallelism gains and costs: ResNet-18 at 32 px, global batch 128, on generated images.

Two processes with one thread each against one process with one thread and with two (the same processors), and against
the same training written with Accelerate and with Lightning Fabric.
"""

from __future__ import annotations

from pathlib import Path

from common.config import config
from configs.ddp_multinode import Config
from tests.benchmarks import elastic_cost, unequal_ranks
from tests.benchmarks.drawing import Figure, draw_bars
from tests.benchmarks.libraries import data_parallel_team, same_first_losses
from tests.benchmarks.measure import Samples, Task, Team
from tests.benchmarks.parts import QUIET, Part, run_of
from tests.benchmarks.records import Row, Table, at_least, at_most

NAME = "ddp_multinode"
SETTINGS = (
    "model=resnet18",
    "batch=128",
    "data.name=generated",
    "data.samples=1280",
    "optim.warmup=0",
    "optim.decay=constant",
    "optim.base_batch=0",
)
BRIEF = (*SETTINGS, "steps=8", "data.test_limit=10", "launch.threads=1")
TWO, ONE = "processes_per_node=2", "processes_per_node=1"
OURS = "DDP, 2 processes"
SMALL = 16  # of a batch: the smaller, the more of a step is communication
MEMORY, SOCKETS = "built-in, memory", "built-in, sockets"


def sides(scratch: Path) -> list[Team | Task]:
    cfg = config.load_config(Config, [*QUIET, *SETTINGS, TWO])
    return [
        run_of(scratch, OURS, NAME, *BRIEF, TWO),
        run_of(scratch, "FSDP2, 2 processes", NAME, *BRIEF, TWO, "strategy=fsdp"),
        run_of(scratch, "find_unused_parameters", NAME, *BRIEF, TWO, "find_unused_parameters=true"),
        run_of(scratch, "bf16 gradients", NAME, *BRIEF, TWO, "communication=bf16"),
        run_of(scratch, "1 process, 1 thread", NAME, *BRIEF, ONE),
        run_of(scratch, "1 process, 2 threads", NAME, *BRIEF, ONE, "launch.threads=2"),
        data_parallel_team(scratch, cfg),
    ]


def table(taken: Samples) -> Table:
    rows = [Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    rows += [
        at_most("this script / Accelerate", taken.ratio(OURS, "Accelerate"), 1.01),
        at_most("this script / Fabric", taken.ratio(OURS, "Fabric"), 1.01),
        at_least(
            "samples/s of 2 processes / of two times one process with 1 thread",
            taken.ratio("1 process, 1 thread", OURS, 0.5),
            0.85,
        ),
        Row("1 process with 2 threads / 2 processes", [taken.ratio("1 process, 2 threads", OURS)]),
        Row("FSDP2 / DDP", [taken.ratio("FSDP2, 2 processes", OURS)]),
        Row("bf16 gradients / float32", [taken.ratio("bf16 gradients", OURS)]),
        Row("find_unused_parameters=true / false", [taken.ratio("find_unused_parameters", OURS)]),
    ]
    return Table(("measured", "value"), rows)


def backend_sides(scratch: Path) -> list[Team | Task]:
    words = (*BRIEF, TWO, f"batch={SMALL}", "steps=24")
    builtin = (*words, "launch.backend=builtin")
    return [
        run_of(scratch, "gloo", NAME, *words),
        run_of(scratch, MEMORY, NAME, *builtin),
        run_of(scratch, SOCKETS, NAME, *builtin, "launch.transport=network"),
    ]


def backend_table(taken: Samples) -> Table:
    rows = [Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    rows.append(at_most(f"{MEMORY} / gloo", taken.ratio(MEMORY, "gloo"), 0.95))
    rows.append(Row(f"{SOCKETS} / gloo", [taken.ratio(SOCKETS, "gloo")]))
    return Table(("measured", "value"), rows)


PARTS = [
    Part(
        f"{NAME}/step",
        f"a training step: {' '.join(SETTINGS[:4])}",
        sides,
        table,
        check=same_first_losses(OURS, 1e-3),
        facts={"threads": "1 a process", "batch": 128},
    ),
    Part(
        f"{NAME}/backend",
        f"a step of two ranks by backend: {SETTINGS[0]} batch={SMALL} {' '.join(SETTINGS[2:4])}",
        backend_sides,
        backend_table,
        facts={"threads": "1 a process", "batch": SMALL},
    ),
    unequal_ranks.PART,
    elastic_cost.PART,
]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/step", draw_bars)}
