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
    command = [sys.executable, "-m", "tests.harness.sharded_optimizers", *OPTIMIZERS]
    completed = warm.execute(command, env=environment())
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert not completed.stdout, completed.stdout + completed.stderr


def test_the_example_of_the_contributing_page_passes_and_a_norm_of_shards_does_not(tmp_path: Path) -> None:
    for name, error in (
        (f"{write_example(tmp_path, 'lion.py')}:Lion", ""),
        (write_own(tmp_path, LOCAL_NORM), LOCAL_NORM.told),
    ):
        command = [sys.executable, "-m", "slurm", "check-optimizer", "--", name]
        completed = warm.execute(command, env=environment())
        passed_checks = [line.removeprefix("ok  ") for line in completed.stdout.splitlines()]
        assert passed_checks[: len(CHECKS)] == list(CHECKS), completed.stdout + completed.stderr
        assert len(passed_checks) == len(CHECKS) + (not error), completed.stdout + completed.stderr
        assert completed.returncode == (2 if error else 0), completed.stderr
        assert error in completed.stderr, completed.stderr
        assert not error or (
            completed.stderr.startswith(f"error: optim.name={name}: ") and completed.stderr.count("\n") == 1
        )
