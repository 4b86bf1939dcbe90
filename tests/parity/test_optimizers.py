"""Optimizers of sharded parameters equal those of full ones, and `check-optimizer` finds those that do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from common.training.optimizer_contract import CHECKS
from configs.shared import OPTIMIZERS
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment
from tests.harness.custom_code.examples import write_example
from tests.harness.custom_code.optimizers import Violation, write_optimizer
from tests.harness.ranks.programs import execute_program

LOCAL_NORM = Violation(  # each rank divides by the norm of its shard
    'p.add_(state["mean"]',
    'p.add_(state["mean"] / (1 + getattr(p.grad, "_local_tensor", p.grad).norm())',
    "parameters sharded by FSDP2 get different values than full parameters: compute each norm from full_tensor()",
)


def test_sharded_parameters_get_the_values_of_full_ones() -> None:
    completed = execute_program("sharded_optimizers", *OPTIMIZERS)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert not completed.stdout, completed.stdout + completed.stderr


def check_optimizer(name: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Execute `check-optimizer`. Returns the process and the checks that passed."""
    command = [sys.executable, "-m", "slurm", "check-optimizer", "--", name]
    completed = execution.execute_command(command, env=make_environment())
    return completed, [line.removeprefix("ok  ") for line in completed.stdout.splitlines()]


def test_the_example_of_the_contributing_page_passes(tmp_path: Path) -> None:
    completed, passed_checks = check_optimizer(f"{write_example(tmp_path, 'lion.py')}:Lion")
    assert completed.returncode == 0, completed.stderr
    assert passed_checks[: len(CHECKS)] == list(CHECKS), completed.stdout
    assert len(passed_checks) == len(CHECKS) + 1, completed.stdout


def test_a_norm_of_shards_is_refused(tmp_path: Path) -> None:
    name = write_optimizer(tmp_path, LOCAL_NORM)
    completed, passed_checks = check_optimizer(name)
    assert completed.returncode == 2, completed.stderr
    assert passed_checks == list(CHECKS), completed.stdout + completed.stderr
    assert completed.stderr.startswith(f"error: optim.name={name}: ")
    assert completed.stderr.count("\n") == 1, completed.stderr
    assert LOCAL_NORM.message_part in completed.stderr
