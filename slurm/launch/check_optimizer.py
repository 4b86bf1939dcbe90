"""The verb `check-optimizer`: test that a custom optimizer works with schedules, checkpoints, and sharding."""

from __future__ import annotations

import argparse

from common.system.errors import UserError
from common.training import custom_optimizer
from configs.shared import Optim


def main(args: argparse.Namespace) -> int:
    """Test an optimizer, print each requirement that the optimizer meets, and return the exit status.

    Raises UserError if the optimizer is missing or its settings are invalid.
    """
    if not args.file:
        raise UserError("FILE is missing; set, for example, FILE=my_optimizer.py:Lion")
    optim = Optim(name=args.file)
    try:
        optim.check()
    except ValueError as error:
        raise UserError(str(error)) from None
    custom_optimizer.check_custom_optimizer(optim)
    from common.training import optimizer_contract  # imports torch

    return optimizer_contract.check_optimizer_on_two_ranks(
        optim, lambda requirement: print(f"ok  {requirement}", flush=True)
    )
