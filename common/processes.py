"""Starting processes on this machine and ending them: whatever way a run ends, no process of it is left.

Processes are forked after the script's imports, so that two ranks cost one `import torch`. The parent
must not have used autograd, OpenMP or CUDA before.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from common.config import UserError
from common.launch import Place

GRACE = 2.0  # seconds between asking the other processes to end and ending them
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NEW = 60.0  # seconds in which a folder may not have its lock yet
PDEATHSIG = 1  # from linux/prctl.h


@dataclasses.dataclass
class Child:
    rank: int
    pid: int
    status: int | None = None
    """The wait status once the process has ended."""


def fork_all(body: Callable[[Place], None], size: int, nodes: int, meanwhile: Callable[[], None]) -> int:
    """Run `body` in `size` forked processes; returns the exit status of the run.

    `meanwhile` runs here while they start. The first process that fails ends all others: its
    message or traceback is shown once, those of its peers are only in their logs.
    """
    private, lock = meeting_place()
    children: list[Child] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for rank in range(size):
            place = Place(rank, size, rank, size, rank // (size // nodes), nodes, "local", str(private / "store"))
            children.append(Child(rank, fork(body, place, private)))
        meanwhile()
        return wait_all(children, private)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        end_all(children)
        shutil.rmtree(private, ignore_errors=True)
        os.close(lock)
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # a progress bar that was ended has hidden the cursor


def meeting_place() -> tuple[Path, int]:
    """A private folder for the processes to meet in, and its lock, which we and our children hold as long as we live.

    Folders whose lock nobody holds any more are swept away: a launcher that was killed left them.
    """
    for path in Path(tempfile.gettempdir()).glob("rendezvous-*-*"):
        with contextlib.suppress(OSError):  # locked, somebody else's, or gone
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(handle)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > NEW:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
    private = Path(tempfile.mkdtemp(prefix=f"rendezvous-{os.getpid()}-"))
    lock = os.open(private, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a network disk may know no locks; then nothing is ever swept
        fcntl.flock(lock, fcntl.LOCK_EX)
    return private, lock


def fork(body: Callable[[Place], None], place: Place, private: Path) -> int:
    """Start one process; returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # a signal between the fork and the child's own handlers would run the parent's handlers in the child
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid == 0:
        run_child(body, place, private, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return pid


def run_child(body: Callable[[Place], None], place: Place, private: Path, parent: int) -> None:
    """The life of a forked process; never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)  # dies with the parent, however that dies
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and it ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        body(place)
        status = 0
    except BaseException as error:  # noqa: BLE001 (every end is told to the parent)
        status = 2 if isinstance(error, UserError) else 1
        text = str(error) if isinstance(error, UserError) else traceback.format_exc()
        note = {"user": isinstance(error, UserError), "text": text}
        with contextlib.suppress(OSError):
            (private / f"error-{place.rank}.json").write_text(json.dumps(note))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def wait_all(children: list[Child], private: Path) -> int:
    """Wait until all have ended well, or the first one badly; tells what happened and returns the exit status."""
    while any(child.status is None for child in children):
        ended = [child for child in children if child.status is None and reap(child)]
        failed = [child for child in ended if child.status]
        if failed:
            return tell(first_cause(failed, private), len(children), private)
        if not ended:
            time.sleep(0.01)
    return 0


def first_cause(failed: list[Child], private: Path) -> Child:
    """Of processes found dead at once, the one that began it: a killed one, else the first that raised."""

    def when(child: Child) -> float:
        with contextlib.suppress(OSError):
            return (private / f"error-{child.rank}.json").stat().st_mtime
        return 0.0

    return min(failed, key=when)


def reap(child: Child) -> bool:
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        child.status = status
    return bool(pid)


def tell(child: Child, size: int, private: Path) -> int:
    """Print why a run failed; returns its exit status."""
    assert child.status is not None
    others = f"; the other {size - 1} were stopped" if size > 1 else ""
    if os.WIFSIGNALED(child.status):
        number = os.WTERMSIG(child.status)
        name = signal.Signals(number).name
        print(f"error: rank {child.rank} (pid {child.pid}) was killed by {name}{others}", file=sys.stderr)
        return 128 + number
    try:
        note = json.loads((private / f"error-{child.rank}.json").read_text())
    except (OSError, ValueError):
        note = {"user": False, "text": ""}
    if note["user"]:
        print(f"error: {note['text']}", file=sys.stderr)
    else:
        print(f"{note['text']}error: rank {child.rank} failed as shown above{others}", file=sys.stderr)
    return os.WEXITSTATUS(child.status)


def end_all(children: list[Child]) -> None:
    """Ask all that still run to end, then end them."""
    for signal_number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
        alive = [child for child in children if child.status is None and not reap(child)]
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal_number)
        deadline = time.monotonic() + patience
        while any(child.status is None and not reap(child) for child in alive) and time.monotonic() < deadline:
            time.sleep(0.01)
