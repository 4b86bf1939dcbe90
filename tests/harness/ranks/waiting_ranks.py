"""An experiment whose rank 0 waits for rank 1: python -m tests.harness.ranks.waiting_ranks key=value ..."""

from __future__ import annotations

import time

from common.training.entry_point import start
from common.training.run import Run
from configs.mnist_pipeline import Config


def main(cfg: Config, run: Run) -> None:
    world = run.world
    print("waiting", flush=True)
    if world.rank == 1:
        time.sleep(100)
    world.gather(world.rank)


if __name__ == "__main__":
    start(main, Config)
