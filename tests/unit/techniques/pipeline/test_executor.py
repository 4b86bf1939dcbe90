"""The engines of the pipeline, without an experiment."""

from __future__ import annotations

import sys

from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment


def test_every_engine_and_schedule_equals_training_in_one_process() -> None:
    """Gradients, running statistics of BatchNorm and the evaluation, also for activations that are not contiguous."""
    process = execution.execute_command(
        [sys.executable, "-m", "tests.harness.ranks.pipeline_engines"], env=make_environment()
    )
    assert process.returncode == 0, process.stderr
