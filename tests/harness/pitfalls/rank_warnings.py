"""ddp_multinode with warnings of rank 1, logged as in tutorials and as in this project.

python -m tests.harness.pitfalls.rank_warnings key=value ...
"""

from __future__ import annotations

import logging
import warnings

from common.training.entry_point import start
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode

LOGGER_WARNING = "a batch of rank 1 is empty"
RUN_WARNING = "a batch of this rank is empty"
PYTHON_WARNING = "the mean of an empty batch is undefined"


def main(cfg: Config, run: Run) -> None:
    logging.basicConfig(level=logging.INFO if run.world.is_main else logging.ERROR, force=True)
    if not run.world.is_main:
        logging.getLogger("train").warning(LOGGER_WARNING)
        run.log_message(RUN_WARNING, logging.WARNING)
        warnings.warn(PYTHON_WARNING, stacklevel=1)  # as torch and numpy do
    ddp_multinode.main(cfg, run)


if __name__ == "__main__":
    start(main, Config)
