"""Custom optimizers and learning rate decays: functions that check and use the user's files.

This module does not import torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from common.config.custom_function import (
    convert_errors_of_user_file,
    load_function,
    locate_function_file,
)
from configs.shared import DECAYS, OPTIMIZERS, Optim, TrainingExperiment

BUILTIN_NAMES = {"name": ", ".join(OPTIMIZERS), "decay": ", ".join(DECAYS)}
KINDS = {"name": "optimizer", "decay": "decay"}  # for each `optim` setting, the kind of object that its file defines
DECAY_USAGE = "function(step, total) must return a finite number >= 0, by which the peak learning rate is multiplied"


def check_optimizer_of_config(settings: TrainingExperiment) -> None:
    """Check the custom optimizer and the custom decay of a config, if any.

    Raises UserError if a custom file is missing or a custom decay returns an invalid factor. The class of a custom
    optimizer is checked by `Attempt.check_custom_optimizer`, because this check imports torch.
    """
    check_custom_optimizer(settings.optim)


def check_custom_optimizer(optim: Optim) -> None:
    """Check the file of a custom optimizer and the factors of a custom decay.

    Raises UserError if the file is missing or a factor is invalid.
    """
    if ":" in optim.name:
        locate_function_file("optim.name", optim.name, BUILTIN_NAMES["name"], "Class")
    if ":" in optim.decay:
        for step in (0, 1, 50, 99):
            compute_custom_decay(optim.decay, step, 100)


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
    function = load_decay_function(value)
    with convert_errors_of_user_file("optim.decay", value, function, DECAY_USAGE):
        factor = float(function(step, total))
        if not 0 <= factor < math.inf:
            raise ValueError(f"the function returned {factor:g} for step {step} of {total}; {DECAY_USAGE}")
    return factor
