"""Compare parameters sharded by FSDP2 with full parameters, on two ranks, for the named optimizers.

    python -m tests.harness.ranks.sharded_optimizers NAME ...      names of optim.name

Prints one line per difference.
"""

from __future__ import annotations

import sys

from common.ranks.rendezvous import World
from common.training.optimizer_contract import check_sharded_parameters
from configs.shared import Launch, Optim
from tests.harness.ranks.programs import run_on_ranks


def compare_optimizers(world: World) -> None:
    for name in sys.argv[1:]:
        for settings in (Optim(name=name), Optim(name=name, weight_decay=0.01, decayed="matrices")):
            try:
                check_sharded_parameters(settings, world.size)
            except ValueError as error:
                if world.is_main:
                    print(f"{name}: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(run_on_ranks(compare_optimizers, 2, Launch(device="cpu", setup_timeout=60, step_timeout=60)))
