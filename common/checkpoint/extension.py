"""Checks of the settings with which a run is resumed. This module does not import torch."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path

from common.checkpoint import permissions, storage
from common.config import changed_settings, config
from common.runs.folder import MODEL_FACTS_FILE, RunFolder, read_json
from common.system.errors import UserError
from common.system.text import format_count
from configs.dataparallel import RanksPerNode
from configs.fields import find_group
from configs.shared import Experiment, InitialWeights, TrainingExperiment


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
    """Return True if a config has more steps than the finished run."""
    steps, epoch_steps = read_step_counts(folder)
    return bool(epoch_steps) and cfg.compute_total_steps(epoch_steps) > steps


def find_checkpoint_of_step(folder: RunFolder, step: int) -> storage.CheckpointPath | None:
    """Return the checkpoint that was saved after a given step, or None if this checkpoint does not exist."""
    for checkpoint in storage.list_resumable_checkpoints(folder):
        if checkpoint.step == step:
            return checkpoint
    return None


def check_resume(folder: RunFolder, cfg: Experiment) -> None:
    """Raise UserError if a run cannot be resumed with the settings of `cfg`."""
    check_read_permission(folder)
    if folder.result.get("state") == "finished":
        if config_adds_steps(folder, cfg):
            check_last_checkpoint(folder)
        else:
            check_unchanged_settings(folder, cfg)
    newest = read_newest_manifest(folder)
    if newest is None:
        return
    check_unchanged_weights(folder, cfg)
    if 0 < cfg.steps < newest.step:
        raise UserError(
            f"steps={cfg.steps} is less than the {newest.step} steps that {folder.path.name} has completed; "
            f"use steps={newest.step} or more, or start a new run"
        )
    check_requested_epochs(folder, cfg, newest)
    if isinstance(cfg, TrainingExperiment) and cfg.ranks_have_separate_models:
        check_number_of_ranks(newest.processes, cfg.processes)


def check_unchanged_weights(folder: RunFolder, cfg: Experiment) -> None:
    """Raise UserError if a config has other initial weights than the run, which resumes from a checkpoint."""
    initial = find_group(cfg, InitialWeights)
    if initial is None:
        return
    stored = config.read_settings(folder.path).get("weights", InitialWeights.weights)
    _, used_weights = changed_settings.read_last_changes(folder.path).get("weights", (stored, stored))
    # A job stores an absolute path, which ends with the id or the file that the command contained.
    if not Path(used_weights).name.endswith(Path(initial.weights).name):
        problem = f"weights={initial.weights} has no effect, because the run resumes from a checkpoint"
        raise UserError(f"{problem}; omit weights, or start a new run")


def check_requested_epochs(folder: RunFolder, cfg: Experiment, newest: storage.Manifest) -> None:
    """Raise UserError if a config has fewer epochs than the run has completed or begun."""
    epoch = newest.facts.get("epoch", 0)
    epochs_begun = epoch + 1 if newest.facts.get("position", 0) else epoch
    if isinstance(cfg, TrainingExperiment) and cfg.epochs < epochs_begun:
        raise UserError(
            f"epochs={cfg.epochs} is less than the {epochs_begun} epochs that {folder.path.name} has begun; "
            f"use epochs={epochs_begun} or more, or start a new run"
        )


def check_read_permission(folder: RunFolder) -> None:
    """Raise UserError if checkpoints cannot be listed, because the run would then restart from an older step."""
    unreadable = permissions.list_unreadable_dirs(folder)
    if unreadable:
        raise UserError(f"{unreadable[0]} cannot be read; {permissions.format_permission_remedy(folder)}")


def read_newest_manifest(folder: RunFolder) -> storage.Manifest | None:
    """Read the manifest of the checkpoint from which the run would resume; return None if there is none."""
    for checkpoint in storage.list_resumable_checkpoints(folder):
        with contextlib.suppress(storage.InvalidCheckpoint):
            return storage.read_manifest(checkpoint)
    return None


def check_requested_ranks(folder: RunFolder, schema: type[Experiment], requested: Mapping[str, str]) -> None:
    """Raise UserError if the command line requests a number of ranks that cannot load the newest checkpoint.

    Call this function before the settings are checked. Otherwise, a batch that cannot be divided among these ranks is
    reported first, but the batch of a resumed run cannot change.
    """
    if not (issubclass(schema, TrainingExperiment) and schema.ranks_have_separate_models):
        return
    newest = read_newest_manifest(folder)
    if newest is None:
        return
    settings = config.read_settings(folder.path) | dict(requested)
    nodes = str(settings.get("launch.nodes"))
    ranks_per_node = str(settings.get(config.RANKS_PER_NODE))
    if not nodes.isdecimal() or not ranks_per_node.isdecimal():  # an invalid number is reported with its key later
        return
    check_number_of_ranks(newest.processes, RanksPerNode(int(ranks_per_node)).count_ranks(int(nodes)))


def check_number_of_ranks(saved_ranks: int, ranks: int) -> None:
    """Raise UserError if a checkpoint with separate parameters for each rank cannot be loaded by `ranks` ranks."""
    if ranks == saved_ranks:
        return
    saved = format_count(saved_ranks, "rank")
    raise UserError(
        f"the checkpoint contains separate parameters for {saved}, but this run has {ranks}; resume with {saved}, "
        "or start a new run from the mean parameters with weights=CHECKPOINT_FOLDER"
    )


def check_last_checkpoint(folder: RunFolder) -> None:
    """Raise UserError if a finished run cannot be extended from the checkpoint of its last step.

    The checksums of all files are verified, because a run that fails after an attempt was opened loses its result.
    """
    step, _ = read_step_counts(folder)
    problem = f"{folder.path.name} cannot be extended: the checkpoint of its last step ({step})"
    checkpoint = find_checkpoint_of_step(folder, step)
    if checkpoint is None:
        raise UserError(f"{problem} is missing; start a new run")
    try:
        manifest = storage.read_manifest(checkpoint)
        for rank in range(manifest.processes):
            storage.read_verified_rank_file(checkpoint, manifest, rank)
    except storage.UnreadableCheckpoint:
        raise UserError(f"{problem} cannot be read; {permissions.format_permission_remedy(folder)}") from None
    except storage.InvalidCheckpoint as reason:
        raise UserError(f"{problem} is invalid: {reason}; restore the checkpoint, or start a new run") from None


def check_unchanged_settings(folder: RunFolder, cfg: Experiment) -> None:
    """Raise UserError if a config changes settings of a finished run, which has no effect without more steps."""
    # `changes` compares the config with the run's settings. The newest attempt may have used other settings, so the
    # config is also compared with the settings of the newest attempt.
    changes = config.find_changes(folder.path, cfg)
    ineffective = dict(changes)
    for name, (original, newest) in changed_settings.read_last_changes(folder.path).items():
        _, requested = changes.get(name, (original, original))
        ineffective[name] = (newest, requested)
    ineffective = {name: pair for name, pair in ineffective.items() if pair[0] != pair[1]}
    if ineffective:
        remedy = "start a new run"
        if isinstance(cfg, TrainingExperiment):
            has_model = read_step_counts(folder) != (0, 0)
            extension = "increase steps" if cfg.steps else "increase epochs"
            if not has_model:
                extension = f"restore {MODEL_FACTS_FILE} to extend the run"
            remedy = f"{extension}, or {remedy}"
        problem = f"{changed_settings.describe_changes(ineffective)} has no effect"
        raise UserError(f"{folder.path.name} is finished: {problem}; {remedy}")


def describe_extension(folder: RunFolder, cfg: Experiment) -> str:
    """Return a message about the additional steps of a finished run."""
    done, epoch_steps = read_step_counts(folder)
    total = cfg.compute_total_steps(epoch_steps)
    return f"extending the run after step {done}; the learning rate schedule now covers {total} steps"


def explain_finished_run(folder: RunFolder, cfg: Experiment) -> str:
    """Return a message that states that a run is finished and explains how to extend the run."""
    message = f"{folder.path} is finished; see {folder.path / 'result.json'}"
    steps, epoch_steps = read_step_counts(folder)
    if not isinstance(cfg, TrainingExperiment) or not steps:
        return message
    if find_checkpoint_of_step(folder, steps) is None:
        return message
    settings = [f"steps={2 * steps}"] if cfg.steps else []
    if not cfg.steps or cfg.epochs * epoch_steps < 2 * steps:
        settings.append(f"epochs={cfg.epochs + 1}")
    return f'{message}\nto extend it: make exp RESUME={shlex.quote(folder.reference)} ARGS="{" ".join(settings)}"'
