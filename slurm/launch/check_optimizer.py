"""The verb `check-optimizer`: test that a custom optimizer works with schedules, checkpoints, and sharding."""

from __future__ import annotations

import argparse

from common.config.custom_function import locate_function_file
from common.system.errors import UserError
from configs.shared import OPTIMIZERS, Optim


def main(args: argparse.Namespace) -> int:
    """Test an optimizer, print each requirement that the optimizer meets, and return the exit status.

    Raises UserError if the optimizer is missing or its settings are invalid.
    """
    if not args.file:
        raise UserError("FILE is missing; set, for example, FILE=my_optimizer.py:Lion")
    if ":" in args.file:
        locate_function_file("FILE", args.file, ", ".join(OPTIMIZERS), "Class")
    elif args.file not in OPTIMIZERS:
        raise UserError(f"FILE={args.file} is unknown; use FILE.py:Class or one of {', '.join(OPTIMIZERS)}")
    optim = Optim(name=args.file)
    from common.training import optimizer_contract  # imports torch

    return optimizer_contract.check_optimizer_on_two_ranks(
        optim, lambda requirement: print(f"ok  {requirement}", flush=True)
    )
