"""Two ranks that log some values in only some of the steps: python -m tests.harness.ranks.logging_ranks FOLDER MODE

MODE is `averaged` (both ranks have values) or the only rank that has values. The rows are in metrics.jsonl of the only
run folder in FOLDER.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch

from common.measure.metrics_log import MEAN, MetricsLog
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.runs.metrics_writer import MetricsWriter
from configs.shared import Launch
from tests.harness.ranks.programs import run_on_ranks

STEPS = 24


class OneSamplePerStep:
    """A sample counter for steps of one sample each."""

    steps = STEPS

    def count_samples(self, steps: int) -> int:
        return steps


def log_steps(mode: str, folder: RunFolder, world: World) -> None:
    source = MEAN if mode == "averaged" else int(mode)
    writer = MetricsWriter(folder.metrics_file, print)
    log = MetricsLog(Ranks(world), writer, OneSamplePerStep(), source=source)
    for step in range(1, STEPS + 1):
        values: dict[str, torch.Tensor | float | None] = {"loss": torch.tensor(float(step + world.rank))}
        if step % 10 == 1:
            values["every_10_steps"] = 2.0 * step
        if step % 7 == 0:
            values["infinite"] = torch.tensor(math.inf)
        if log.is_averaged and world.rank == 1 and step == 5:
            values["on_rank_1"] = 7.0
        has_values = log.is_averaged or world.rank == log.source
        logged_values = values if has_values else dict.fromkeys(values)
        log.add_step(step, time.perf_counter(), logged_values)
        if log.is_flush_due or step in (4, 16):
            log.flush()
    log.flush()


def main(path: str, mode: str) -> int:
    folder = RunFolder.create(Path(path), "mnist_pipeline", "").claim_attempt()
    settings = Launch(device="cpu", threads=1, step_timeout=5.0)
    return run_on_ranks(lambda world: log_steps(mode, folder, world), 2, settings)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
