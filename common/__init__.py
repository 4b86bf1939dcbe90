"""Packages that all experiments share. Importing this package sets up the handling of Ctrl-C during imports."""

import _thread
import os
import signal
import sys
import threading
from pathlib import Path


def exit_on_interrupt(number: int, frame: object) -> None:
    """Print one line and exit after Ctrl-C.

    This handler raises no exception, because an exception during the import of a library could be swallowed.
    """
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:  # OpenBLAS sends SIGINT to its own process if it cannot start threads
        from common.system.process_limits import describe_thread_shortage

        os.write(2, f"error: {describe_thread_shortage()}\n".encode())
        os._exit(1)
    os.write(2, b"\nstopped by Ctrl-C\n")
    os._exit(128 + number)


def is_project_command() -> bool:
    """Return whether this process executes a file of experiments, slurm or common.

    These files call `exit_on_user_error`.
    """
    project = Path(__file__).resolve().parent.parent
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    path = Path(main_file or "/").resolve()
    if not path.is_relative_to(project):
        return False
    return path.relative_to(project).parts[0] in ("experiments", "slurm", "common")


if threading.current_thread() is threading.main_thread() and is_project_command():
    signal.signal(signal.SIGINT, exit_on_interrupt)  # `exit_on_user_error` replaces this handler
