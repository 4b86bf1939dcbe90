"""Progress of a run on one rank: what a checkpoint stores and what a rank that joins an elastic run copies.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

GENERATIONS_FILE = "generations.json"  # rank changes of an attempt


class RunProgress:
    """Progress of a run, which the training loop, the saver and the metrics log share.

    Only this class changes the attributes. All ranks must call the methods after the same steps.
    """

    def __init__(self) -> None:
        self.step = 0
        """Number of completed steps, including those of earlier attempts."""
        self.resumed_after = 0
        """Number of steps that earlier attempts completed."""
        self.start_time = time.perf_counter()
        """Start of the run as a time.perf_counter() value, moved back by the duration of earlier attempts."""
        self.best_score: float | None = None
        """The best value so far of the score that `checkpoint.best` names; None before the first evaluation."""
        self.unevaluated = False
        """True while an evaluation is due or running; False once it has finished."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint that this attempt has saved."""
        self.best_step: int | None = None
        """Step of the best checkpoint that this attempt has saved."""
        self.generations: list[dict[str, Any]] = []
        """Lost and joined ranks of an elastic run, one entry per change; see common/runs/rank_changes.py."""

    @property
    def elapsed_seconds(self) -> float:
        """Duration of the run in seconds, including earlier attempts."""
        return time.perf_counter() - self.start_time

    def complete_step(self, *, evaluation_due: bool = False) -> None:
        """Record that the next step was completed, and whether the model is evaluated before a further step."""
        self.step += 1
        self.unevaluated = evaluation_due

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluate after the newest step within the `with` block. After an error, the evaluation remains due."""
        self.unevaluated = True
        yield
        self.unevaluated = False

    def improve_best_score(self, score: float, save: Callable[[], bool]) -> None:
        """Record a new best score and call `save`, which returns whether the model with this score was saved.

        If the model was not saved, the previous score remains the best one. If `save` raises RuntimeError, the
        evaluation is also due again.
        """
        previous = self.best_score
        self.best_score = score
        is_saved = False
        try:
            is_saved = save()
        except RuntimeError:
            self.unevaluated = True
            raise
        finally:
            if not is_saved:
                self.best_score = previous

    def record_save(self, step: int, *, best: bool) -> None:
        """Record that a checkpoint was saved after `step` steps."""
        self.saved_step = step
        if best:
            self.best_step = step

    def add_generation(self, change: dict[str, Any]) -> None:
        """Record a change in the set of ranks."""
        self.generations = [*self.generations, change]

    # ---- checkpoints

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores in addition to its step."""
        return {"seconds": self.elapsed_seconds, "best": self.best_score, "unevaluated": self.unevaluated}

    def resume_after(self, step: int, saved: Mapping[str, Any], score_name: str) -> None:
        """Continue from a checkpoint that was saved after `step` steps and stores the values `saved`.

        The best score is unknown if it is not the score that `checkpoint.best` names now, `score_name`.
        """
        self.step = step
        self.resumed_after = step
        self.start_time -= saved["seconds"]
        self.best_score = saved["best"] if saved.get("best_of", score_name) == score_name else None
        self.unevaluated = saved.get("unevaluated", False)

    # ---- elastic runs

    def to_peer_facts(self) -> dict[str, Any]:
        """Return all values, to be sent to the other ranks."""
        facts = self.to_checkpoint()
        for name in ("step", "resumed_after", "saved_step", "best_step", "generations"):
            facts[name] = getattr(self, name)
        return facts

    def copy_from_peer(self, facts: Mapping[str, Any], *, joins: bool) -> None:
        """Set all values to those of another rank. Only a rank that `joins` also takes over the start of the run."""
        if joins:
            self.start_time = time.perf_counter() - facts["seconds"]
            self.resumed_after = facts["resumed_after"]
        self.step = facts["step"]
        self.best_score = facts["best"]
        self.unevaluated = facts["unevaluated"]
        self.saved_step = facts["saved_step"]
        self.best_step = facts["best_step"]
        self.generations = facts["generations"]
