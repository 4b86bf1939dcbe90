"""Files of a user's own optimizer and learning rate: checked, kept in the source of a run, called. Imports no torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.core.own_function import find_kept_file, load_function, locate_errors, locate_function_file, prefer_kept
from common.runs.provenance import keep_function_file
from configs.shared import DECAYS, OPTIMIZERS, Optim

KNOWN = {"name": ", ".join(OPTIMIZERS), "decay": ", ".join(DECAYS)}
KINDS = {"name": "optimizer", "decay": "decay"}  # what the file of such a setting makes
KEPT: dict[str, str] = {}
"""Settings of the run of this rank, with the files that the run keeps in place of those that were named."""
USAGE = "function(step, total) returns the factor of the peak rate, a number of at least 0"


def check_files_of_config(optim: Optim, code: Path | None = None, named: Container[str] = ()) -> None:
    """Raise UserError for a file that is not there, and for a decay that gives no learning rate.

    `code` is the source of the run that has these settings already, for the files that it keeps, but not
    those of the settings that are `named`. The class of an optimizer is tried where torch is imported, by
    `contract.optimizer.check_optimizer_of_run`.
    """
    kept = point_to_kept_files(optim, code) if code else optim
    optim = replace(kept, **{key: getattr(optim, key) for key in KINDS if f"optim.{key}" in named})
    if ":" in optim.name:
        locate_function_file("optim.name", optim.name, KNOWN["name"], "Class")
    if ":" in optim.decay:
        for step in (0, 1, 50, 99):
            compute_own_decay(optim.decay, step, 100)


def point_to_kept_files(optim: Optim, code: Path) -> Optim:
    """Return the settings with the files of a user's own that a run keeps in its source, if it keeps any."""
    kept: dict[str, Any] = {}
    for key, kind in KINDS.items():
        value = getattr(optim, key)
        kept[key] = prefer_kept(value, find_kept_file(kind, value, code))
    return replace(optim, **kept)


def copy_optimizer_files(optim: Optim, code: Path, *, anew: Container[str] = ()) -> None:
    """Copy the files of a user's own into the source of a run where they are missing, or their settings are in `anew`.

    Raises UserError.
    """
    for key, kind in KINDS.items():
        keep_function_file(kind, getattr(optim, key), code, anew=f"optim.{key}" in anew)


def use_kept_files(optim: Optim, code: Path) -> Optim:
    """Read from now on, in this rank, the files that its run keeps in its source; return the settings with these."""
    kept = point_to_kept_files(optim, code)
    KEPT.update({optim.name: kept.name, optim.decay: kept.decay})
    return kept


@functools.cache
def load_decay(value: str) -> Callable[[int, int], Any]:
    """Return the function of optim.decay=FILE.py:function, read once. Raises UserError."""
    return load_function("optim.decay", value, KNOWN["decay"])


def compute_own_decay(value: str, step: int, total: int) -> float:
    """Return the factor that a user's function gives for a step after the warm-up, of `total`. Raises UserError."""
    value = KEPT.get(value, value)
    function = load_decay(value)
    with locate_errors("optim.decay", value, function, USAGE):
        factor = float(function(step, total))
        if not 0 <= factor < math.inf:
            raise ValueError(f"it returned {factor:g} for step {step} of {total}; {USAGE}")
    return factor
