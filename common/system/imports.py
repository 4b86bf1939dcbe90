"""Imports of large libraries without garbage collection."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def import_without_garbage_collection() -> Iterator[None]:
    """Exclude the objects that the imports in this context create from garbage collection.

    `import torch` creates hundreds of thousands of objects that stay reachable until the process exits. Examining them
    takes a fifth of the time of the import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # otherwise, the first collection after the imports would examine all of these objects
        if was_enabled:
            gc.enable()
