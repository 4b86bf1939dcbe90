"""mnist_pipeline whose ranks report whether the config has changed.

python -m tests.harness.runs.final_config key=value ...
"""

from __future__ import annotations

import sys

from common.config import config
from common.training.entry_point import start
from common.training.run import Run
from configs.mnist_pipeline import Config
from experiments import mnist_pipeline


def main(cfg: Config, run: Run) -> None:
    checked_config = config.format_yaml(config.load_config(Config, sys.argv[1:]))
    mnist_pipeline.main(cfg, run)
    saved_config = (run.folder.path / "config.yaml").read_text()
    is_unchanged = config.format_yaml(cfg) == config.format_yaml(run.cfg) == checked_config == saved_config
    unchanged_by_rank = run.world.gather(is_unchanged)
    run.log_message(f"config unchanged on all ranks: {unchanged_by_rank}")


if __name__ == "__main__":
    start(main, Config)
