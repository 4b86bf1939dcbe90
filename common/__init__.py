"""The packages that experiments share, and the answer to Ctrl-C while they are imported."""

import _thread
import os
import signal
import sys
import threading
from pathlib import Path


def exit_on_interrupt(number: int, frame: object) -> None:
    """Leave in one line. An exception may be lost within the import of a library, or leave it half imported."""
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:  # OpenBLAS sends this signal to its process where it cannot start its threads
        from common.core.process_limits import describe_shortage

        os.write(2, f"error: {describe_shortage()}\n".encode())
        os._exit(1)
    os.write(2, b"\nstopped by Ctrl-C\n")
    os._exit(128 + number)


def is_project_command() -> bool:
    """Check that this process executes a file of experiments, slurm or common, and ends by `exit_on_user_error`."""
    root, file = Path(__file__).resolve().parent.parent, getattr(sys.modules.get("__main__"), "__file__", None)
    path = Path(file or "/").resolve()
    return path.is_relative_to(root) and path.relative_to(root).parts[0] in ("experiments", "slurm", "common")


if threading.current_thread() is threading.main_thread() and is_project_command():
    signal.signal(signal.SIGINT, exit_on_interrupt)  # until `exit_on_user_error`
