"""Mark waits of the main thread that do not depend on other ranks.

An elastic run ends a rank that seems to wait for a lost rank forever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

IS_WAITING = threading.Event()
"""Set while the main thread is in a marked wait."""


@contextlib.contextmanager
def mark_bounded_wait() -> Iterator[None]:
    """Mark a wait of the main thread for the disk, or a wait that has its own time limit."""
    IS_WAITING.set()
    try:
        yield
    finally:
        IS_WAITING.clear()
