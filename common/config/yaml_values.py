"""Values by dotted name, such as `optim.lr`, as YAML text. Values are read as text, without conversion to types.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf

from common.config.config_keys import nest_values

YAML_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the loader of libyaml is eight times faster


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text, in which each scalar is a string. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=YAML_LOADER)  # noqa: S506 (creates only str, list and dict)


def flatten_mapping(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one dict with dotted names as keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten_mapping(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def describe_yaml_position(error: yaml.YAMLError) -> str:
    """Return the position of a YAML error, such as " at line 2, column 5", or an empty string if it is unknown."""
    mark = getattr(error, "problem_mark", None)
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def format_values(values: Mapping[str, Any]) -> str:
    """Return values by dotted name as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(nest_values(values)))
