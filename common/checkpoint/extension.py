"""Training on: a finished run that is given more steps. Imports no torch."""

from __future__ import annotations

from common.checkpoint import storage
from common.core.errors import UserError
from common.runs.folder import MODEL_FACTS, Folder, read_json
from configs.shared import Experiment


def count_steps(folder: Folder, settings: Experiment) -> tuple[int, int]:
    """The steps that a finished run has done, and those that the settings ask for; (0, 0) where it does not tell."""
    done, epoch_steps = read_json(folder.path / MODEL_FACTS).get("step"), read_epoch_steps(folder)
    if not isinstance(done, int) or not epoch_steps:
        return 0, 0
    return done, settings.total_steps(epoch_steps)


def read_epoch_steps(folder: Folder) -> int:
    """The steps of an epoch of a finished run; 0 where it does not tell."""
    found = read_json(folder.path / MODEL_FACTS).get("epoch_steps")
    return found if isinstance(found, int) else 0


def asks_for_more_steps(folder: Folder, settings: Experiment) -> bool:
    """Whether the settings ask for more steps than a finished run has done. Raises UserError if it cannot go on."""
    done, total = count_steps(folder, settings)
    if total <= done:
        return False
    if not has_last_checkpoint(folder, done):
        raise UserError(
            f"{folder.path.name} cannot be trained on: it has no checkpoint of its last step, {done}, any more; "
            "start a new run"
        )
    return True


def has_last_checkpoint(folder: Folder, step: int) -> bool:
    """Whether a run still has the checkpoint of its last step."""
    return any(snapshot.step == step for snapshot in storage.list_candidates(folder))


def describe_finished(folder: Folder, settings: Experiment) -> str:
    """That a run is finished, and what to type to train on."""
    told = f"{folder.path} is finished; see {folder.path / 'result.json'}"
    done, _ = count_steps(folder, settings)
    if not done or not has_last_checkpoint(folder, done):
        return told
    longer = [f"steps={2 * done}"] if settings.steps else []
    if not settings.steps or settings.epochs * read_epoch_steps(folder) < 2 * done:
        longer.append(f"epochs={settings.epochs + 1}")
    return f'{told}\nto train on: make exp RESUME={folder.path.name} ARGS="{" ".join(longer)}"'
