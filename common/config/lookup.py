"""Import of objects by name, so that a lower layer loads code of a higher layer only if a setting requires it."""

from __future__ import annotations

import importlib
from typing import Any


def import_object(path: str) -> Any:
    """Import the object that `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
