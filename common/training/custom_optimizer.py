"""Custom optimizers and learning rate decays: functions that check, copy, and use the user's files.

This module does not import torch.
"""

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
KINDS = {"name": "optimizer", "decay": "decay"}  # for each `optim` setting, the kind of object that its file defines
FILES_OF_RUN: dict[str, str] = {}
"""Maps `FILE.py:NAME` in a setting to `COPY.py:NAME`, where COPY.py is the copy of the file in the run folder."""
DECAY_USAGE = "function(step, total) must return the factor of the peak learning rate, a finite number of at least 0"


def check_custom_files(optim: Optim, code: Path | None = None, new_settings: Container[str] = ()) -> None:
    """Raise UserError if a custom file is missing or a custom decay returns an invalid factor.

    `code` is the source folder of an existing run with these settings. The copies in this folder are checked instead of
    the original files, except for the settings in `new_settings`, which name new files. The class of a custom optimizer
    is not checked here, because this requires torch; see `contract.optimizer.check_optimizer_of_run`.
    """
    run_optim = replace_files_with_run_copies(optim, code) if code else optim
    name = optim.name if "optim.name" in new_settings else run_optim.name
    decay = optim.decay if "optim.decay" in new_settings else run_optim.decay
    if ":" in name:
        locate_function_file("optim.name", name, BUILTIN_NAMES["name"], "Class")
    if ":" in decay:
        for step in (0, 1, 50, 99):
            compute_custom_decay(decay, step, 100)


def replace_files_with_run_copies(optim: Optim, code: Path) -> Optim:
    """Return the settings, in which custom files are replaced with existing copies in a run's source folder."""
    settings: dict[str, Any] = {}
    for setting, kind in KINDS.items():
        value = getattr(optim, setting)
        settings[setting] = replace_file_with_run_copy(value, locate_file_copy(kind, value, code))
    return replace(optim, **settings)


def copy_custom_files(optim: Optim, code: Path, *, overwrite: Container[str] = ()) -> None:
    """Copy custom files into the source folder of a run.

    An existing copy is replaced only if its setting is in `overwrite`. Raises UserError if a file cannot be written.
    """
    for setting, kind in KINDS.items():
        copy_function_file(kind, getattr(optim, setting), code, overwrite=f"optim.{setting}" in overwrite)


def use_file_copies_of_run(optim: Optim, code: Path) -> None:
    """Make this process use the copies of custom files in a run's source folder."""
    run_optim = replace_files_with_run_copies(optim, code)
    FILES_OF_RUN[optim.name] = run_optim.name
    FILES_OF_RUN[optim.decay] = run_optim.decay


@functools.cache
def load_decay_function(value: str) -> Callable[[int, int], Any]:
    """Load the function given by optim.decay=FILE.py:function, once per process.

    Raises UserError if the function cannot be loaded.
    """
    return load_function("optim.decay", value, BUILTIN_NAMES["decay"])


def compute_custom_decay(value: str, step: int, total: int) -> float:
    """Return the learning rate factor that a custom decay computes for one step.

    `step` is counted from 0 after the warm-up; `total` is the number of steps after the warm-up. Raises UserError if
    the user's function fails or returns an invalid factor.
    """
    value = FILES_OF_RUN.get(value, value)
    function = load_decay_function(value)
    with convert_errors_of_user_file("optim.decay", value, function, DECAY_USAGE):
        factor = float(function(step, total))
        if not 0 <= factor < math.inf:
            raise ValueError(f"the function returned {factor:g} for step {step} of {total}; {DECAY_USAGE}")
    return factor
