"""Names of the folders of offline W&B runs. This module does not import torch."""

from __future__ import annotations

import datetime
from pathlib import Path

OFFLINE_PREFIX = "offline-run-"
OFFLINE_TIME_FORMAT = "%Y%m%d_%H%M%S"


def choose_offline_path(wandb_folder: Path, name: str) -> Path:
    """Return the path of a new offline run, whose name contains the second in which it was created.

    Two attempts may be converted within the same second. The later one gets the next second that is free.
    """
    second, _, run_id = name.removeprefix(OFFLINE_PREFIX).partition("-")
    created = datetime.datetime.strptime(second, OFFLINE_TIME_FORMAT)
    path = wandb_folder / name
    while path.exists():
        created += datetime.timedelta(seconds=1)
        path = wandb_folder / f"{OFFLINE_PREFIX}{created:{OFFLINE_TIME_FORMAT}}-{run_id}"
    return path
