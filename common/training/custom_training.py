"""Checks of a custom network, a custom loss and the targets of a custom data set, before a run starts.

This module does not import torch. The checks that need torch run in a forked process.
"""

from __future__ import annotations

from pathlib import Path

from common.config.custom_code import use_file_copies
from common.config.custom_function import locate_function_file
from common.config.lookup import import_object
from common.data import sources
from common.data.prepare import PreparedDataset
from common.system.errors import UserError
from configs.shared import TrainingExperiment

TRIAL_TIMEOUT = 600.0  # in seconds; importing torch from a slow disk takes a long time


def check_files_of_config(settings: TrainingExperiment) -> None:
    """Raise UserError if the file of a custom network or a custom loss does not exist."""
    for setting, kind in (("model", "Class"), ("loss", "function")):
        value = getattr(settings, setting, "")
        if ":" in value:
            locate_function_file(setting, value, "the built-in names that --help lists", kind)


def check_training(cfg: TrainingExperiment, prepared: PreparedDataset, code: Path | None) -> None:
    """Check the network and the loss of a config on samples of its data set.

    `code` is the source folder of an existing run, whose copies of custom files are checked. Raises UserError if the
    settings, the data set, the network and the loss do not fit together.
    """
    check_targets(cfg, prepared)
    if ":" in getattr(cfg, "model", "") or ":" in cfg.loss:
        cfg = use_file_copies(cfg, code) if code else cfg
        sources.call_in_subprocess(run_trial, cfg, prepared, limit=TRIAL_TIMEOUT)


def run_trial(cfg: TrainingExperiment, prepared: PreparedDataset) -> None:
    """Import torch and compute the losses of some samples. Raises UserError."""
    import_object("common.training.training_trial:try_training")(cfg, prepared)


def check_targets(cfg: TrainingExperiment, prepared: PreparedDataset) -> None:
    """Raise UserError if settings need class labels, and the data set has none, or vice versa."""
    kind = prepared.target_kind
    can_draw_targets = kind == "labels" and getattr(cfg, "can_draw_targets", False)
    if cfg.loss == "mse" and kind != "floats" and not can_draw_targets:
        raise UserError(
            f"loss=mse needs float targets, but the targets of data.name={cfg.data.name} are integers; "
            "use loss=cross_entropy, a custom loss, or a data set with float targets"
        )
    problem = f"needs class labels, which data.name={cfg.data.name} does not have"
    if cfg.loss == "cross_entropy" and kind not in ("labels", "tokens"):
        raise UserError(f"loss=cross_entropy {problem}; use loss=mse or a custom loss")
    if cfg.checkpoint.best == "test_accuracy" and kind != "labels":
        raise UserError(f"checkpoint.best=test_accuracy {problem}; use checkpoint.best=test_loss")
