"""ddp_multinode whose rank 1 warns, as tutorials set up their logging and as a run does: for tests/pitfalls/.

python -m tests.harness.warnings_of_ranks key=value ...
"""

from __future__ import annotations

import logging
import warnings

from common.training.entry_point import start
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode

LOST, SAID, WARNED = "a batch of rank 1 is empty", "a batch of this rank is empty", "this rank averages over nothing"


def main(cfg: Config, run: Run) -> None:
    logging.basicConfig(level=logging.INFO if run.world.is_main else logging.ERROR, force=True)
    if not run.world.is_main:
        logging.getLogger("train").warning(LOST)
        run.log_message(SAID, logging.WARNING)
        warnings.warn(WARNED, stacklevel=1)  # as torch and numpy do
    ddp_multinode.main(cfg, run)


if __name__ == "__main__":
    start(main, Config)
