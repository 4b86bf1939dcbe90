"""Two ranks that log some values in some steps only: python -m tests.harness.ranks.logging_ranks FOLDER MODE

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
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.ranks import Ranks
from common.runs.folder import RunFolder
from common.runs.metrics_writer import MetricsWriter
from configs.shared import Launch

STEPS = 24


class Counted:
    """Steps of one sample each."""

    steps = STEPS

    def count_samples(self, steps: int) -> int:
        return steps


def main(path: str, mode: str) -> int:
    folder = RunFolder.create(Path(path), "mnist_pipeline", "").claim_attempt()

    def body(info: RankInfo) -> None:
        with rendezvous.join_world(info, Launch(device="cpu", threads=1, step_timeout=5.0)) as world:
            source = MEAN if mode == "averaged" else int(mode)
            log = MetricsLog(Ranks(world), MetricsWriter(folder.metrics_file, print), Counted(), source=source)
            for step in range(1, STEPS + 1):
                values: dict[str, torch.Tensor | float | None] = {"loss": torch.tensor(float(step + world.rank))}
                if step % 10 == 1:
                    values["rare"] = 2.0 * step
                if step % 7 == 0:
                    values["other"] = torch.tensor(math.inf)
                if log.is_averaged and world.rank == 1 and step == 5:
                    values["of_rank_1"] = 7.0
                has_values = log.is_averaged or world.rank == log.source
                logged_values = values if has_values else dict.fromkeys(values)
                log.add_step(step, time.perf_counter(), logged_values)
                if log.is_flush_due or step in (4, 16):
                    log.flush()
            log.flush()

    return local_launcher.run_ranks(body, 2, 1, lambda: None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
