"""Values by dotted name, such as `optim.lr`, as YAML text. Values are read as text, without conversion to types.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf

from common.config.config_keys import nest_values
from common.system.errors import UserError

YAML_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the loader of libyaml is eight times faster


class UniqueKeyLoader(YAML_LOADER):
    """Create only str, list and dict. Reject mappings in which a key occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep=deep)
        first_keys: dict[str, Any] = {}
        for key, _ in node.value:
            if first_keys.setdefault(key.value, key) is not key:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
        return mapping


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text, in which each scalar is a string.

    Raises yaml.YAMLError if the text is invalid or a mapping contains a key twice.
    """
    return yaml.load(text, Loader=UniqueKeyLoader)  # noqa: S506 (creates only str, list and dict)


def flatten_mapping(tree: Mapping[str, Any], prefix: str = "", origin: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one dict with dotted names as keys.

    Raises UserError if two keys have the same dotted name, such as `optim.lr` and `lr` in `optim`. The error message
    begins with `origin`.
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = {prefix + name: value}
        if isinstance(value, Mapping):
            inner = flatten_mapping(value, f"{prefix}{name}.", origin)
        for key in inner.keys() & flat.keys():
            raise UserError(f"{origin}duplicate key {key!r}; remove one of them")
        flat |= inner
    return flat


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Return the position and cause of a YAML error, or an empty string if they are unknown.

    An example is " at line 2, column 5 (duplicate key 'batch')".
    """
    mark = getattr(error, "problem_mark", None)
    return f" at line {mark.line + 1}, column {mark.column + 1} ({getattr(error, 'problem', '')})" if mark else ""


def format_values(values: Mapping[str, Any]) -> str:
    """Return values by dotted name as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(nest_values(values)))
