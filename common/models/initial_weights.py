"""The file, checkpoint folder or run whose weights a model begins with. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint import storage
from common.core.errors import UserError
from common.runs.folder import Folder
from configs.optional import InitialWeights


def find_weights(text: str, runs: Path) -> Path:
    """Return the file or folder that `weights=` names; a run's id or its last four characters will do.

    Raises UserError.
    """
    name = Path(text).name  # a job's settings hold absolute paths
    short = runs.glob(f"*-{name}") if len(name) == 4 and name.isalnum() else ()
    for path in (Path(text), runs / name, *short):
        if path.exists():
            return path
    raise UserError(
        f"weights={text}: no such file, checkpoint folder or run; name a file of tensors, a run's id, or none"
    )


def check_weights_of_config(settings: object) -> None:
    """Raise UserError for a config whose weights are not there; configs without initial weights pass."""
    if isinstance(settings, InitialWeights) and settings.weights != "none":
        find_weights(settings.weights, Path(settings.runs))


def leave_out_replaced_weights(settings: object, run: Folder) -> None:
    """Set `weights` to none where the run has a checkpoint, which replaces them: they need not be there any more."""
    if isinstance(settings, InitialWeights) and storage.list_resumable_checkpoints(run):
        settings.weights = "none"
