"""Settings that a run has measured or chosen: the file resolved.yaml beside config.yaml.

The config of a run does not change. `common.config.config.read_settings` reads both files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import config
from common.runs.folder import write_atomic


def record_resolved_settings(run: Path, values: Mapping[str, Any]) -> None:
    """Add values, by dotted name, to resolved.yaml in a run folder. Only one rank may call this function.

    Resumed and repeated runs use these values. Raises UserError if the file cannot be written or is damaged.
    """
    if not values:
        return
    file = run / config.RESOLVED_FILE
    known = config.read_config_file(file) if file.exists() else {}
    write_atomic(file, config.format_values(known | dict(values)), durable=True)
