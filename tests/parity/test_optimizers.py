"""Optimizers of sharded parameters equal those of full ones, and `check-optimizer` tells which do not."""

from __future__ import annotations

import sys
from pathlib import Path

from common.training.optimizer_contract import CHECKS
from configs.shared import OPTIMIZERS
from tests.harness import warm
from tests.harness.own_data import write_example
from tests.harness.own_optimizer import Breach, write_own
from tests.harness.processes import environment

LOCAL_NORM = Breach(  # each rank divides by the norm of its shard
    'p.add_(state["mean"]',
    'p.add_(state["mean"] / (1 + getattr(p.grad, "_local_tensor", p.grad).norm())',
    "parameters sharded by FSDP2 get different values than full parameters: compute each norm from full_tensor()",
)


def test_sharded_parameters_get_the_values_of_full_ones() -> None:
    words = [sys.executable, "-m", "tests.harness.sharded_optimizers", *OPTIMIZERS]
    done = warm.execute(words, env=environment())
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_the_example_of_the_contributing_page_passes_and_a_norm_of_shards_does_not(tmp_path: Path) -> None:
    for name, told in (
        (f"{write_example(tmp_path, 'lion.py')}:Lion", ""),
        (write_own(tmp_path, LOCAL_NORM), LOCAL_NORM.told),
    ):
        words = [sys.executable, "-m", "slurm", "check-optimizer", "--", name]
        done = warm.execute(words, env=environment())
        kept = [line.removeprefix("ok  ") for line in done.stdout.splitlines()]
        assert kept[: len(CHECKS)] == list(CHECKS) and len(kept) == len(CHECKS) + (not told), done.stdout + done.stderr
        assert done.returncode == (2 if told else 0) and told in done.stderr, done.stderr
        assert not told or (done.stderr.startswith(f"error: optim.name={name}: ") and done.stderr.count("\n") == 1)
