"""ddp_multinode with warnings of rank 1, logged as in tutorials and as in this project: for tests/pitfalls/.

python -m tests.harness.pitfalls.rank_warnings key=value ...
"""

from __future__ import annotations

import logging
import warnings

from common.training.entry_point import start
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode

LOST = "a batch of rank 1 is empty"
SAID = "a batch of this rank is empty"
WARNED = "this rank averages over nothing"


def main(cfg: Config, run: Run) -> None:
    logging.basicConfig(level=logging.INFO if run.world.is_main else logging.ERROR, force=True)
    if not run.world.is_main:
        logging.getLogger("train").warning(LOST)
        run.log_message(SAID, logging.WARNING)
        warnings.warn(WARNED, stacklevel=1)  # as torch and numpy do
    ddp_multinode.main(cfg, run)


if __name__ == "__main__":
    start(main, Config)
