"""Extension of a finished run by more steps. Imports no torch."""

from __future__ import annotations

from common.checkpoint import storage
from common.core import config
from common.core.errors import UserError
from common.runs.folder import MODEL_FACTS, Folder, read_json
from configs.shared import Experiment


def read_step_counts(folder: Folder) -> tuple[int, int]:
    """Return the steps that a finished run has done and the steps of an epoch; (0, 0) if they are not recorded."""
    facts = read_json(folder.path / MODEL_FACTS)
    done, epoch_steps = facts.get("step"), facts.get("epoch_steps")
    return (done, epoch_steps) if isinstance(done, int) and isinstance(epoch_steps, int) and epoch_steps else (0, 0)


def has_more_steps(folder: Folder, cfg: Experiment) -> bool:
    """Check whether a config asks for more steps than a finished run has done. Raises UserError if it cannot resume."""
    done, epoch_steps = read_step_counts(folder)
    if not epoch_steps or cfg.total_steps(epoch_steps) <= done:
        return False
    if not has_checkpoint(folder, done):
        raise UserError(
            f"{folder.path.name} cannot be trained on: it has no checkpoint of its last step, {done}, any more; "
            "start a new run"
        )
    return True


def has_checkpoint(folder: Folder, step: int) -> bool:
    """Check whether a run has a checkpoint of a step."""
    return any(checkpoint.step == step for checkpoint in storage.list_resumable_checkpoints(folder))


def check_settings_of_finished(folder: Folder, cfg: Experiment) -> None:
    """Raise UserError where a run is finished and a config has other settings, which no step is left for."""
    if folder.result.get("state") != "finished" or has_more_steps(folder, cfg):
        return
    changed, last = config.find_changes(folder.path / "config.yaml", cfg), config.read_last_changes(folder.path)
    known = {name: now for name, (_, now) in last.items()}
    other = {name: (known.get(name, then), now) for name, (then, now) in changed.items()}
    other |= {name: (now, then) for name, (then, now) in last.items() if name not in changed}
    without = {name: pair for name, pair in other.items() if pair[0] != pair[1]}
    if without:
        what = f"{folder.path.name} is finished: {config.describe_changes(without)} has no effect"
        raise UserError(f"{what}; give it more steps or epochs, or start a new run")


def describe_finished(folder: Folder, cfg: Experiment) -> str:
    """Return a message that a run is finished, with the command that extends it."""
    message = f"{folder.path} is finished; see {folder.path / 'result.json'}"
    done, epoch_steps = read_step_counts(folder)
    if not done or not has_checkpoint(folder, done):
        return message
    longer = [f"steps={2 * done}"] if cfg.steps else []
    if not cfg.steps or cfg.epochs * epoch_steps < 2 * done:
        longer.append(f"epochs={cfg.epochs + 1}")
    return f'{message}\nto train on: make exp RESUME={folder.path.name} ARGS="{" ".join(longer)}"'
