"""What the shared tests need to know about an experiment. tests/harness/entries/NAME.py declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.config import config
from configs.shared import TrainingExperiment

MLP = ("model=mlp", "bucket_mb=0.05")  # several buckets, as a larger model has them
FEW_STEPS = ("steps=4", "batch=6", "checkpoint.every_steps=2", "data.test_limit=20", "eval_batch=4")
SCORES = ("test_accuracy", "test_loss", "test_samples", "samples_per_second")


@dataclass(frozen=True)
class Entry:
    """An experiment, its smallest settings, what its result must hold, and its part in tests of several experiments."""

    name: str
    smallest: tuple[str, ...]
    processes: int
    produces: tuple[str, ...]
    spread: Callable[[int], tuple[str, ...]]
    """The settings that give a run so many processes; they take a batch of 24."""
    own_technique: str = ""
    """The folder of the technique that belongs to this experiment alone, so that both can be deleted; else empty."""
    others: tuple[tuple[str, ...], ...] = ()
    """Settings under which resuming is no matter of course: each must go on to the bit, too."""
    learns_at_once: bool = True
    """Whether the 40th loss of the smallest settings is below the first; else there is a checkpoint after each 20."""
    keeps_ranks: bool = False
    """Whether only as many ranks as saved a checkpoint can go on from it."""
    page_settings: tuple[str, ...] = ()
    """Settings that make the commands of the pages small and leave the settings of the commands as they are."""
    page_commands: Mapping[str, str] = field(default_factory=dict)
    """Commands of the pages that are not executed as they are, each with the test file that covers it."""
    techniques: frozenset[str] | None = None
    """The techniques that a run may load; None if no test of the loaded modules trains this experiment."""
    exports: bool = False
    """Whether its network is exported by torch.export: one experiment for each kind of network."""
    evaluated: tuple[tuple[str, ...], ...] = ()
    """Settings of runs whose trained model is evaluated in one process, with the same scores."""
    elastic_campaign: tuple[str, ...] | None = None
    """Settings of the runs that campaigns strike with elastic=true; None if campaigns leave the experiment out."""
    cluster_settings: tuple[str, ...] = ()
    """Settings of the runs that faults strike on a local cluster. Models and batches are small, and the cables slow:
    runs wait rather than compute, so that one is struck in its middle on any machine, beside other runs."""
    check_four_hosts: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether the result of 12 steps on four hosts is right; None if no test trains the experiment on four hosts."""
    transports: tuple[str, ...] = ()
    """Transports of the built-in backend, beside the network, over which two ranks are tested to equal one."""

    @property
    def trains(self) -> bool:
        """Whether there is a model: else there are neither losses nor scores."""
        return issubclass(config.import_schema(self.name), TrainingExperiment)
