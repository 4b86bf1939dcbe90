"""Custom optimizers and learning-rate decays in users' files: checked, copied into a run, called. Imports no torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.custom_function import (
    convert_errors_of_user_file,
    load_function,
    locate_file_copy,
    locate_function_file,
    replace_file_with_run_copy,
)
from common.runs.provenance import copy_function_file
from configs.shared import DECAYS, OPTIMIZERS, Optim

BUILTIN_NAMES = {"name": ", ".join(OPTIMIZERS), "decay": ", ".join(DECAYS)}
KINDS = {"name": "optimizer", "decay": "decay"}  # what the file of each setting defines
FILES_OF_RUN: dict[str, str] = {}
"""Settings of this rank's run with the copies that the run keeps in place of the original files."""
DECAY_USAGE = "function(step, total) returns the factor of the peak rate, a number of at least 0"


def check_files_of_config(optim: Optim, code: Path | None = None, new_settings: Container[str] = ()) -> None:
    """Raise UserError for a missing file, and for a decay that returns no valid factor.

    `code` is the source of an existing run with these settings. Its copies of the files are checked, except those of
    `new_settings`, which name new files. The class of an optimizer is checked where torch is imported, by
    `contract.optimizer.check_optimizer_of_run`.
    """
    run_optim = point_to_kept_files(optim, code) if code else optim
    name = optim.name if "optim.name" in new_settings else run_optim.name
    decay = optim.decay if "optim.decay" in new_settings else run_optim.decay
    if ":" in name:
        locate_function_file("optim.name", name, BUILTIN_NAMES["name"], "Class")
    if ":" in decay:
        for step in (0, 1, 50, 99):
            compute_custom_decay(decay, step, 100)


def point_to_kept_files(optim: Optim, code: Path) -> Optim:
    """Return the settings with the copies of custom files in the source of a run, if it has any."""
    settings: dict[str, Any] = {}
    for setting, kind in KINDS.items():
        value = getattr(optim, setting)
        settings[setting] = replace_file_with_run_copy(value, locate_file_copy(kind, value, code))
    return replace(optim, **settings)


def copy_optimizer_files(optim: Optim, code: Path, *, overwrite: Container[str] = ()) -> None:
    """Copy custom files into the source of a run if they are missing or their settings are in `overwrite`.

    Raises UserError.
    """
    for setting, kind in KINDS.items():
        copy_function_file(kind, getattr(optim, setting), code, overwrite=f"optim.{setting}" in overwrite)


def use_kept_files(optim: Optim, code: Path) -> None:
    """Use the copies of custom files in the source of a run from now on, in this process."""
    run_optim = point_to_kept_files(optim, code)
    FILES_OF_RUN[optim.name] = run_optim.name
    FILES_OF_RUN[optim.decay] = run_optim.decay


@functools.cache
def load_decay(value: str) -> Callable[[int, int], Any]:
    """Return the function of optim.decay=FILE.py:function, read once. Raises UserError."""
    return load_function("optim.decay", value, BUILTIN_NAMES["decay"])


def compute_custom_decay(value: str, step: int, total: int) -> float:
    """Return the factor of a custom decay for a step after the warm-up, of `total`. Raises UserError."""
    value = FILES_OF_RUN.get(value, value)
    function = load_decay(value)
    with convert_errors_of_user_file("optim.decay", value, function, DECAY_USAGE):
        factor = float(function(step, total))
        if not 0 <= factor < math.inf:
            raise ValueError(f"it returned {factor:g} for step {step} of {total}; {DECAY_USAGE}")
    return factor
