"""Declarations of an experiment for the shared tests. tests/harness/entries/NAME.py contains those of NAME."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.config import config
from configs.shared import TrainingExperiment

MLP_SETTINGS = ("model=mlp", "bucket_mb=0.05")  # with several buckets, as in a larger model
FEW_STEPS_SETTINGS = ("steps=4", "batch=6", "checkpoint.every_steps=2", "data.test_limit=20", "eval_batch=4")
SCORE_KEYS = ("test_accuracy", "test_loss", "test_samples", "samples_per_second")


@dataclass(frozen=True)
class Entry:
    """An experiment, its smallest settings, the keys of its result, and what shared tests need to know about it."""

    name: str
    smallest_settings: tuple[str, ...]
    processes: int
    result_keys: tuple[str, ...]
    """Keys that the result of a run must contain."""
    make_rank_settings: Callable[[int], tuple[str, ...]]
    """Returns the settings for a number of ranks. The batch size is 24."""
    data_name: str = "digits"
    """The data set of the smallest settings. Only data sets with class labels have an accuracy."""
    own_technique: str = ""
    """Folder of the technique that only this experiment uses, or empty. Both can be deleted together."""
    resume_variants: tuple[tuple[str, ...], ...] = ()
    """Further settings with which a resumed run must equal an uninterrupted run bit for bit."""
    loss_decreases_early: bool = True
    """Whether the 40th loss is lower than the first. If not, the smallest settings must save every 20th step."""
    fixes_rank_count: bool = False
    """Whether a run can only be resumed on the number of ranks that have saved the checkpoint."""
    page_settings: tuple[str, ...] = ()
    """Settings that shorten the commands of the pages. None of them occurs in these commands."""
    page_commands_tested_elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Commands of the pages that are not executed as written, each with the test file that covers it."""
    allowed_techniques: frozenset[str] | None = None
    """The techniques that a run may load; None if no test of loaded modules trains this experiment."""
    tests_export: bool = False
    """Whether torch.export is tested with its network: one experiment for each kind of network."""
    evaluation_variants: tuple[tuple[str, ...], ...] = ()
    """Settings of runs whose trained model must have the same scores when it is evaluated on one rank."""
    elastic_campaign_settings: tuple[str, ...] | None = None
    """Settings of elastic runs in campaigns of faults; None if campaigns do not use this experiment."""
    cluster_settings: tuple[str, ...] = ()
    """Settings of runs with faults on a local cluster.

    Models and batches are small, and the cables are slow. The runs wait more than they compute. Therefore, a fault
    happens in the middle of a run on any machine, even if other runs use the machine.
    """
    is_correct_on_four_hosts: Callable[[Mapping[str, Any]], bool] | None = None
    """Returns whether the result of 12 steps on four hosts is correct. None if the experiment is not tested there."""
    parity_transports: tuple[str, ...] = ()
    """Transports of the built-in backend, besides the network, with which two ranks must equal one rank."""

    @property
    def has_accuracy(self) -> bool:
        """Whether an evaluation yields an accuracy."""
        return self.data_name == "digits"

    @property
    def trains_model(self) -> bool:
        """Whether the experiment trains a model. Then its runs have losses and scores."""
        return issubclass(config.import_schema(self.name), TrainingExperiment)
