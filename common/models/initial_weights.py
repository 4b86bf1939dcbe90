"""Search for the file, checkpoint folder or run that contains a model's initial weights.

This module does not import torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from common.checkpoint import storage
from common.config.config_keys import replace_values
from common.runs.folder import RunFolder
from common.system.errors import UserError
from configs.fields import find_group
from configs.shared import Experiment, InitialWeights

S = TypeVar("S")
SHORT_ID_LENGTH = 4  # a short id consists of the last characters of a run id


def find_initial_weights(text: str, runs: Path) -> Path:
    """Return the file or folder that the setting `weights` refers to.

    `text` is a path, the id of a run, or the last four characters of a run's id. Raises UserError if there is no match.
    """
    name = Path(text).name  # the settings of a job contain an absolute path instead of a run id
    is_short_id = len(name) == SHORT_ID_LENGTH and name.isalnum()
    for path in (Path(text), runs / name):
        if os.path.exists(path):
            return path
    short_id_matches = sorted(runs.glob(f"*-{name}")) if is_short_id else []
    if len(short_id_matches) > 1:
        matches = " and ".join(path.name for path in short_id_matches)
        raise UserError(f"weights={text} is ambiguous: the ids {matches} end with {name}; write the full id")
    if short_id_matches:
        return short_id_matches[0]
    raise UserError(
        f"weights={text}: no such file, checkpoint folder or run; set weights to a file of tensors, a run id, or none"
    )


def check_weights_of_config(settings: Experiment) -> None:
    """Raise UserError if a config refers to initial weights that do not exist."""
    initial = find_group(settings, InitialWeights)
    if initial is not None and initial.weights != "none":
        find_initial_weights(initial.weights, Path(settings.runs))


def omit_weights_on_resume(settings: S, run: RunFolder) -> S:
    """Return settings with `weights=none` if the run has a checkpoint to resume from.

    A resumed run does not need the file with the initial weights, and the file may no longer exist.
    """
    if find_group(settings, InitialWeights) is not None and storage.list_resumable_checkpoints(run):
        return replace_values(settings, {"weights": "none"})
    return settings
