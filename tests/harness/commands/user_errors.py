"""An experiment with an error of its author or user.

    ERROR_OF_USER=CASE python -m tests.harness.commands.user_errors key=value ...

CASE is `timeout` (a time-out on rank 1 that no other rank has caused), `after_report_0` or `after_report_1` (that rank
raises an error after the report), `exit` (each rank exits before training), `pipe` (the output is a pipe without a
reader) or `disk` (the output is a file on a full disk). In the last two cases, `main` ends with sys.exit, as a script
may.
"""

from __future__ import annotations

import os
import sys

from common.training.entry_point import start
from common.training.run import Run
from configs.mnist_pipeline import Config
from experiments import mnist_pipeline


def main(cfg: Config, run: Run) -> None:
    case = os.environ["ERROR_OF_USER"]
    if case == "timeout" and run.world.rank == 1:
        raise TimeoutError("the label server did not answer within 3 s")
    if case == "exit":
        sys.exit(2)
    mnist_pipeline.main(cfg, run)
    run.world.gather(0)  # rank 0 has written the result
    if case == f"after_report_{run.world.rank}":
        raise ValueError("the plot has no axes")
    if case == "pipe":
        sys.exit()
    if case == "disk":
        sys.exit(0)


def make_output_unwritable(case: str) -> None:
    """Replace standard output by a pipe without a reader, or by a file on a full disk."""
    if case == "pipe":
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
    if case == "disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


if __name__ == "__main__":
    make_output_unwritable(os.environ["ERROR_OF_USER"])
    start(main, Config)
