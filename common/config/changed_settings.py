"""Settings with which an attempt of a run differs from the run: the file changed.json of the attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.config.config_keys import format_value
from common.system.errors import UserError

Changes = dict[str, tuple[Any, Any]]  # old and new value by dotted name, as strings or lists of strings
CHANGES_FILE = "changed.json"  # exists in an attempt folder if the attempt's settings differ from those of the run
# Keys and groups that do not affect results, so a run can be repeated although they have changed.
KEYS_WITHOUT_EFFECT_ON_RESULTS = ("run.", "wandb.", "launch.transport", "launch.tls")


def describe_changes(changed: Changes) -> str:
    """Format changed settings as text, such as `stages 2 -> 1`."""
    return ", ".join(f"{name} {format_value(old)} -> {format_value(new)}" for name, (old, new) in changed.items())


def read_last_changes(run: Path) -> Changes:
    """Read the settings of a run's newest attempt that differ from config.yaml."""
    attempts = sorted(path for path in run.glob("attempts/[0-9]*") if path.name.isdecimal())
    return read_changes(attempts[-1] / CHANGES_FILE) if attempts else {}


def read_changes_of_attempts(run: Path) -> Changes:
    """Read the training settings that differ from config.yaml in any attempt of a run."""
    changes: Changes = {}
    for path in sorted(run.glob(f"attempts/[0-9]*/{CHANGES_FILE}")):
        changes |= read_changes(path)
    return {name: pair for name, pair in changes.items() if not name.startswith(KEYS_WITHOUT_EFFECT_ON_RESULTS)}


def is_setting_text(value: Any) -> bool:
    """Return whether a value is a string or a list of strings."""
    if isinstance(value, list):
        return all(isinstance(element, str) for element in value)
    return isinstance(value, str)


def read_changes(path: Path) -> Changes:
    """Read the changed settings from a file. Return an empty dict if the file does not exist.

    Raises UserError if the file is damaged.
    """
    try:
        changes = {}
        for name, (old, new) in json.loads(path.read_text()).items():
            if not (is_setting_text(old) and is_setting_text(new)):
                raise ValueError
            changes[name] = (old, new)
        return changes
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(
            f"{path} is damaged, so the settings of its attempt are unknown; "
            "restore the file, or delete it to use the settings of config.yaml"
        ) from None
