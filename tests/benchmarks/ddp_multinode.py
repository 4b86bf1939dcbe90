"""Gains and costs of data parallelism: ResNet-18 at 32 px, global batch 128, on generated images.

Two processes with one thread each against one process with one thread and with two (the same processors), and against
the same training written with Accelerate and with Lightning Fabric.
"""

from __future__ import annotations

from pathlib import Path

from common.config import config
from configs.ddp_multinode import Config
from tests.benchmarks import elastic_cost, strategies, unequal_ranks
from tests.benchmarks.drawing import Figure, make_bar_drawer
from tests.benchmarks.libraries import data_parallel_team, same_first_losses
from tests.benchmarks.measure import Samples, Task, Team
from tests.benchmarks.parts import QUIET, Part, run_of
from tests.benchmarks.records import Row, Table, at_least, at_most, list_step_times, make_value_table
from tests.harness.settings_text import split_settings

NAME = "ddp_multinode"
SETTINGS = split_settings(
    "model=resnet18 batch=128 data.name=generated data.samples=1280 "
    "optim.warmup=0 optim.decay=constant optim.base_batch=0"
)
BRIEF = (*SETTINGS, "steps=5", "data.test_limit=10", "launch.threads=1")
TWO = "processes_per_node=2"
OURS = "DDP, 2 processes"
SINGLE = "processes_per_node=1"
SMALL_BATCH = 16  # the smaller, the more of a step is communication
MEMORY = "built-in, memory"
SOCKETS = "built-in, sockets"
SHARE = "1 process, 1 thread, half the batch"  # as many samples as each of two ranks has
SCALING_LABEL = "step time: 1 process with half the batch / 2 processes"


def sides(scratch: Path) -> list[Team | Task]:
    cfg = config.load_config(Config, [*QUIET, *SETTINGS, TWO])

    def run(label: str, *settings: str) -> Task:
        return run_of(scratch, label, NAME, *BRIEF, *settings)

    return [
        run(OURS, TWO),
        run("FSDP2, 2 processes", TWO, "strategy=fsdp"),
        run("find_unused_parameters", TWO, "find_unused_parameters=true"),
        run("bf16 gradients", TWO, "communication=bf16"),
        run("1 process, 1 thread", SINGLE),
        run(SHARE, SINGLE, f"batch={cfg.batch // 2}"),
        run("1 process, 2 threads", SINGLE, "launch.threads=2"),
        data_parallel_team(scratch, cfg),
    ]


def table(samples: Samples) -> Table:
    rows = list_step_times(samples)
    rows.append(at_most("this script / Accelerate", samples.ratio(OURS, "Accelerate"), 1.01))
    rows.append(at_most("this script / Fabric", samples.ratio(OURS, "Fabric"), 1.01))
    rows.append(at_least(SCALING_LABEL, samples.ratio(SHARE, OURS), 0.85))
    rows.append(Row("1 process with 2 threads / 2 processes", [samples.ratio("1 process, 2 threads", OURS)]))
    rows.append(Row("FSDP2 / DDP", [samples.ratio("FSDP2, 2 processes", OURS)]))
    rows.append(Row("bf16 gradients / float32", [samples.ratio("bf16 gradients", OURS)]))
    rows.append(Row("find_unused_parameters=true / false", [samples.ratio("find_unused_parameters", OURS)]))
    return make_value_table(rows)


def backend_sides(scratch: Path) -> list[Team | Task]:
    settings = (*BRIEF, TWO, f"batch={SMALL_BATCH}", "steps=24")
    builtin = (*settings, "launch.backend=builtin")
    return [
        run_of(scratch, "gloo", NAME, *settings),
        run_of(scratch, MEMORY, NAME, *builtin),
        run_of(scratch, SOCKETS, NAME, *builtin, "launch.transport=network"),
    ]


def backend_table(samples: Samples) -> Table:
    rows = list_step_times(samples)
    rows.append(at_most(f"{MEMORY} / gloo", samples.ratio(MEMORY, "gloo"), 0.95))
    rows.append(Row(f"{SOCKETS} / gloo", [samples.ratio(SOCKETS, "gloo")]))
    return make_value_table(rows)


PARTS = [
    Part(
        f"{NAME}/step",
        f"a training step: {' '.join(SETTINGS[:4])}",
        sides,
        table,
        check=same_first_losses(OURS, 1e-3),
        facts=("1 thread per process unless the table states otherwise", "batch size 128"),
    ),
    Part(
        f"{NAME}/backend",
        f"a step of two ranks by backend: {SETTINGS[0]} batch={SMALL_BATCH} {' '.join(SETTINGS[2:4])}",
        backend_sides,
        backend_table,
        facts=("2 processes with 1 thread each", f"batch size {SMALL_BATCH}"),
    ),
    unequal_ranks.PART,
    elastic_cost.PART,
    strategies.make_part(NAME),
]
FIGURES: dict[str, Figure] = {
    NAME: (f"{NAME}/step", make_bar_drawer("ResNet-18, batch 128")),
    **strategies.make_figures(NAME),
}
