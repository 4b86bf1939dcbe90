"""Import of objects that settings name, so that a lower layer can use code of a higher layer only when it is needed."""

from __future__ import annotations

import importlib
from typing import Any


def import_object(path: str) -> Any:
    """Import the object that `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
