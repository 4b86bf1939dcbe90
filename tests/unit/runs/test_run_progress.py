"""The best score belongs to a model that was saved, and to the score that `checkpoint.best` names."""

from __future__ import annotations

from typing import Any

import pytest

from common.runs.run_progress import RunProgress


def test_a_best_model_that_was_not_saved_does_not_count() -> None:
    progress = RunProgress()
    progress.improve_best_score(0.9, lambda: True)
    progress.improve_best_score(0.95, lambda: False)
    assert progress.best_score == 0.9
    assert not progress.unevaluated


def test_the_evaluation_is_due_again_if_ranks_are_lost_during_a_save() -> None:
    def lose_rank() -> bool:
        raise RuntimeError

    progress = RunProgress()
    with pytest.raises(RuntimeError):
        progress.improve_best_score(0.9, lose_rank)
    assert progress.best_score is None
    assert progress.unevaluated


@pytest.mark.parametrize("saved_name, expected", [("test_loss", None), ("test_accuracy", 0.4), (None, 0.4)])
def test_the_best_value_of_another_score_is_forgotten(saved_name: str | None, expected: float | None) -> None:
    saved: dict[str, Any] = {"seconds": 1.0, "best": 0.4}
    if saved_name is not None:  # missing in older checkpoints
        saved |= {"best_of": saved_name}
    progress = RunProgress()
    progress.resume_after(3, saved, "test_accuracy")
    assert progress.best_score == expected
