"""Checks of the settings with which a run is resumed. This module does not import torch."""

from __future__ import annotations

import contextlib

from common.checkpoint import storage
from common.config import changed_settings, config
from common.runs.folder import MODEL_FACTS_FILE, RunFolder, read_json
from common.system.errors import UserError
from common.system.text import format_count
from configs.shared import Experiment, TrainingExperiment


def read_step_counts(folder: RunFolder) -> tuple[int, int]:
    """Return the number of steps of a finished run and the number of steps per epoch.

    Returns (0, 0) if the run folder does not contain these numbers.
    """
    facts = read_json(folder.path / MODEL_FACTS_FILE)
    steps = facts.get("step")
    epoch_steps = facts.get("epoch_steps")
    if isinstance(steps, int) and isinstance(epoch_steps, int) and epoch_steps:
        return steps, epoch_steps
    return 0, 0


def config_adds_steps(folder: RunFolder, cfg: Experiment) -> bool:
    """Return True if a config has more steps than the finished run.

    Raises UserError if the run cannot be extended because the checkpoint of its last step is missing.
    """
    steps, epoch_steps = read_step_counts(folder)
    if not epoch_steps or cfg.compute_total_steps(epoch_steps) <= steps:
        return False
    if not has_checkpoint_of_step(folder, steps):
        raise UserError(
            f"{folder.path.name} cannot be extended: the checkpoint of its last step ({steps}) is missing; "
            "start a new run"
        )
    return True


def has_checkpoint_of_step(folder: RunFolder, step: int) -> bool:
    """Return True if a run has a checkpoint that was saved after a given step."""
    return any(checkpoint.step == step for checkpoint in storage.list_resumable_checkpoints(folder))


def check_resume(folder: RunFolder, cfg: Experiment) -> None:
    """Raise UserError if a run cannot be resumed with the settings of `cfg`."""
    check_settings_of_finished_run(folder, cfg)
    newest = read_newest_manifest(folder)
    if newest is None:
        return
    if 0 < cfg.steps < newest.step:
        raise UserError(
            f"steps={cfg.steps} is less than the {newest.step} steps that {folder.path.name} has completed; "
            f"use steps={newest.step} or more, or start a new run"
        )
    if isinstance(cfg, TrainingExperiment) and cfg.ranks_have_separate_models:
        check_number_of_ranks(newest.processes, cfg.processes)


def read_newest_manifest(folder: RunFolder) -> storage.Manifest | None:
    """Read the manifest of the checkpoint from which the run would resume; return None if there is none."""
    for checkpoint in storage.list_resumable_checkpoints(folder):
        with contextlib.suppress(storage.InvalidCheckpoint):
            return storage.read_manifest(checkpoint)
    return None


def check_number_of_ranks(saved_ranks: int, ranks: int) -> None:
    """Raise UserError if a checkpoint with separate parameters for each rank cannot be loaded by `ranks` ranks."""
    if ranks == saved_ranks:
        return
    saved = format_count(saved_ranks, "rank")
    raise UserError(
        f"the checkpoint contains separate parameters for {saved}, but this run has {ranks}; resume with {saved}, "
        "or start a new run from the mean parameters with weights=CHECKPOINT_FOLDER"
    )


def check_settings_of_finished_run(folder: RunFolder, cfg: Experiment) -> None:
    """Raise UserError if the run is finished and the config changes settings without adding steps."""
    if folder.result.get("state") != "finished" or config_adds_steps(folder, cfg):
        return
    # `changes` compares the config with the run's settings. The newest attempt may have used other settings, so the
    # config is also compared with the settings of the newest attempt.
    changes = config.find_changes(folder.path, cfg)
    ineffective = dict(changes)
    for name, (original, newest) in changed_settings.read_last_changes(folder.path).items():
        _, requested = changes.get(name, (original, original))
        ineffective[name] = (newest, requested)
    ineffective = {name: pair for name, pair in ineffective.items() if pair[0] != pair[1]}
    if ineffective:
        raise UserError(
            f"{folder.path.name} is finished: {changed_settings.describe_changes(ineffective)} has no effect; "
            "increase steps or epochs, or start a new run"
        )


def explain_finished_run(folder: RunFolder, cfg: Experiment) -> str:
    """Return a message that states that a run is finished and explains how to extend the run."""
    message = f"{folder.path} is finished; see {folder.path / 'result.json'}"
    steps, epoch_steps = read_step_counts(folder)
    if not steps or not has_checkpoint_of_step(folder, steps):
        return message
    settings = [f"steps={2 * steps}"] if cfg.steps else []
    if not isinstance(cfg, TrainingExperiment):
        return message
    if not cfg.steps or cfg.epochs * epoch_steps < 2 * steps:
        settings.append(f"epochs={cfg.epochs + 1}")
    return f'{message}\nto extend it: make exp RESUME={folder.path.name} ARGS="{" ".join(settings)}"'
