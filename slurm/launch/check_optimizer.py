"""The verb `check-optimizer`: tries an optimizer of one's own with schedules, checkpoints and sharding."""

from __future__ import annotations

import argparse

from common.core.errors import UserError
from common.training.optimization import own_files
from configs.shared import Optim


def main(given: argparse.Namespace) -> int:
    """Try an optimizer and print each part of the contract that it keeps; returns the exit status. Raises UserError."""
    if not given.file:
        raise UserError("FILE= names no optimizer; write it as in FILE=my_optimizer.py:Lion")
    optim = Optim(name=given.file)
    try:
        optim.check()
    except ValueError as error:
        raise UserError(str(error)) from None
    own_files.check_files_of_config(optim)
    from common.training.contract import optimizer  # imports torch

    return optimizer.check_on_ranks(optim, lambda words: print(f"kept  {words}", flush=True))
