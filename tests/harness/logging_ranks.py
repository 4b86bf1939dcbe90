"""Two ranks that log values in some steps only: python -m tests.harness.logging_ranks FOLDER MODE

MODE is `averaged` (both ranks have values) or the rank that alone has them. The rows are in metrics.jsonl of the one
run folder in FOLDER.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

from common.data.prepare import Prepared
from common.distributed import local_launcher, rendezvous
from common.distributed.rank_info import RankInfo
from common.runs.folder import Folder
from common.training.run import Run
from configs.mnist_pipeline import Config
from configs.shared import Launch

STEPS = 24


def main(path: str, mode: str) -> int:
    folder = Folder.create(Path(path), "mnist_pipeline", "").claim()
    cfg = Config()
    cfg.log.progress = "none"

    def body(place: RankInfo) -> None:
        with rendezvous.joined_world(place, Launch(device="cpu", threads=1, step_timeout=5.0)) as world:
            run = Run(cfg, folder, world, Prepared("digits", folder.path, {}))
            run.averaged, run.total = mode == "averaged", STEPS
            run.source = 0 if run.averaged else int(mode)
            for step in range(1, STEPS + 1):
                values: dict[str, torch.Tensor | float | None] = {"loss": torch.tensor(float(step + world.rank))}
                if step % 10 == 1:
                    values["rare"] = 2.0 * step
                if step % 7 == 0:
                    values["other"] = torch.tensor(math.inf)
                if run.averaged and world.rank == 1 and step == 5:
                    values["of_rank_1"] = 7.0
                given = values if run.averaged or world.rank == run.source else dict.fromkeys(values)
                run.log(step, **given)
                if step in (4, 16):
                    run.flush()
            run.flush()
            run.close()

    return local_launcher.run_ranks(body, 2, 1, lambda: None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
