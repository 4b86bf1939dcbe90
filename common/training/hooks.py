"""Hooks, with which a technique adds work before, after, and between the steps of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from common.measure.metrics_log import Values
from common.ranks.rendezvous import World
from common.runs.result import ReportData


class StepHook:
    """Base class of hooks. Its methods have no effect; a subclass overrides the methods that it needs.

    `Run.add_hook` adds a hook to a run. All ranks must add the same hooks in the same order.
    """

    def before_load(self) -> None:
        """Prepare the registered model before a checkpoint is loaded. The model has its initial weights."""

    def on_start(self) -> None:
        """Prepare the first step of this attempt. The state is loaded and the metrics log is open."""

    def before_step(self) -> None:
        """Prepare a step, after its batch was loaded and its learning rate was set."""

    def collect_values(self) -> Values:
        """Return values of the completed step to log. Values that the script logs under the same name override them."""
        return {}

    def between_steps(self, number: int) -> None:
        """Act between two steps, after step `number` and after its checkpoint if one was due."""

    def gather_report(self, world: World) -> ReportData:
        """Return the report of this hook at the end of the run. All ranks call this method."""
        return ReportData()

    def on_end(self) -> None:
        """Release resources after the last evaluation or an error. Hooks end in the reverse order of their start."""


class RecoveryHook(StepHook, ABC):
    """Hook that lets a run continue after a rank is lost, by discarding and repeating the failed step."""

    @abstractmethod
    def start_averaging(self, values: Values) -> None:
        """Start averaging logged values of the current step over the ranks."""

    @abstractmethod
    def commit(self) -> dict[str, float]:
        """Return the averaged values of the current step. Raises RuntimeError if a rank is lost."""

    @abstractmethod
    def discard_step(self) -> None:
        """Restore the state at the start of the failed step, except for parameters and optimizer state."""

    @abstractmethod
    def may_come_from_rank_change(self, error: object) -> bool:
        """Return True if an error may have been caused by a lost rank or by a rank that is joining."""

    @abstractmethod
    def join_generation(self) -> None:
        """Form a new process group after a rank was lost or has joined, so that training can continue."""

    @abstractmethod
    def let_ranks_join(self) -> None:
        """Raise an error on all ranks if a rank is waiting to join, so that a new process group is formed."""

    @abstractmethod
    def finish_run(self) -> bool:
        """Return True if all ranks have finished the run. Otherwise, form a new process group and return False."""

    @abstractmethod
    def exit_if_others_can_continue(self, reason: str) -> None:
        """Exit as a lost rank if the other ranks can continue without this rank."""
