"""Settings of a run for another folder or for another version of the source code. This module does not import torch."""

from __future__ import annotations

from pathlib import Path

from common.config.config import read_config_file
from common.config.config_keys import list_keys, read_values
from common.config.yaml_values import format_values
from configs.shared import Experiment


def list_paths(settings: object) -> dict[str, str]:
    """Return the files and folders that the settings of a config refer to, by dotted name."""
    paths = {}
    for key in list_keys(type(settings)).values():
        value = key.get_value(settings)
        if key.metadata.get("is_path") and value != "none":
            paths[key.name] = value
    return paths


def format_yaml_with_keys_of_file(settings: Experiment, file: Path) -> str:
    """Return the config as YAML, limited to the keys of `file`, which an older version has written.

    Keys of the file that the config does not have keep their values.
    """
    values = read_values(settings)
    return format_values({name: values.get(name, text) for name, text in read_config_file(file).items()})
