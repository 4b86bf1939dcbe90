"""Imports of large libraries without garbage collection."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def import_without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during the imports in this context.

    `import torch` creates hundreds of thousands of objects that stay reachable until the process exits. Examining them
    again and again slows the import down. All objects that exist at the end of the context are excluded from later
    collections. If an import fails, no objects are excluded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()  # otherwise, the first collection after the imports would examine all of these objects
    finally:
        if was_enabled:
            gc.enable()
