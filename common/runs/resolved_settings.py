"""Settings that a run has measured or chosen: the file resolved.yaml beside config.yaml.

The config of a run does not change. `common.config.config.read_settings` reads both files. If an attempt has chosen a
setting that differs from the config, the choice is stored with the changed settings of the attempt.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import changed_settings, config
from common.config.yaml_values import format_values
from common.runs.folder import RunFolder, write_atomic, write_json


def record_resolved_settings(run: Path, values: Mapping[str, Any]) -> None:
    """Add values, by dotted name, to resolved.yaml in a run folder. Only one rank may call this function.

    Resumed and repeated runs use these values. Raises UserError if the file cannot be written or is damaged.
    """
    if not values:
        return
    file = run / config.RESOLVED_FILE
    known = config.read_config_file(file) if file.exists() else {}
    write_atomic(file, format_values(known | dict(values)), durable=True)


def record_choice_of_attempt(run: Path, name: str, value: str) -> None:
    """Replace the new value of a changed setting of the newest attempt, so that later attempts use this choice.

    Only one rank may call this function. Raises UserError if the file cannot be written or is damaged.
    """
    changes = changed_settings.read_last_changes(run)
    old_value, _ = changes.pop(name)
    if value != old_value:
        changes[name] = (old_value, value)
    newest_attempt = RunFolder(run).list_attempts()[-1]
    write_json(newest_attempt.attempt_folder / changed_settings.CHANGES_FILE, changes)


def warn_of_lost_choice(run: Path, name: str) -> None:
    """Print a warning if earlier attempts have trained with a choice that resolved.yaml no longer contains.

    An attempt calls this function after it has chosen the setting `name` and before its first step.
    """
    if RunFolder(run).trace_attempts():
        problem = f"{run / config.RESOLVED_FILE} no longer contains {name}, which earlier attempts have chosen"
        print(f"WARNING: {problem}; this attempt has chosen it again", file=sys.stderr, flush=True)
