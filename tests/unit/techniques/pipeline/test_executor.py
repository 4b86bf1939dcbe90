"""The engines of the pipeline, without an experiment."""

from __future__ import annotations

from tests.harness.ranks.programs import check_program


def test_every_engine_and_schedule_equals_training_in_one_process() -> None:
    """Gradients, running statistics of BatchNorm and the evaluation, also for activations that are not contiguous."""
    check_program("pipeline_engines")
