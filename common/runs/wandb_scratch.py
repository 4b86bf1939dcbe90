"""What a tracking process needs for a while: a lock, temporary folders, a place for an unfinished offline run.

W&B's client leaves temporary folders and sockets behind when it is killed. So it gets a temporary folder of its own,
which is noted in the run folder and removed by the process itself, by its owner, or by the next tracking process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.core.errors import UserError
from common.core.processes import Process, list_children
from common.runs.folder import Folder, read_json, write_json

PREFIX = "wandb-run-"  # of temporary folders; short, because the path of a socket has at most 107 characters


def name_staging_folder(folder: Folder) -> Path:
    """Return the folder in which an offline run of W&B is made; its content does not count."""
    return folder.path / "wandb" / "unfinished"


def _note_file(folder: Folder) -> Path:
    return folder.path / "wandb" / "temporary.json"


@contextlib.contextmanager
def locked_tracking(folder: Folder, *, wait: bool = True) -> Iterator[bool]:
    """Let one process at a time pass a run's rows on; without `wait`, yield False where another one does."""
    with open(folder.path / "wandb" / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:  # a network disk may know no locks
            pass
        yield True


def open_temporary_folder(folder: Folder) -> Path:
    """Make and return a temporary folder for this process and its children. Raises UserError."""
    place = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(4)}"
    write_json(_note_file(folder), {"path": str(place), "host": os.uname().nodename})  # first: it may be killed
    try:
        place.mkdir(mode=0o700)
    except OSError as error:
        raise UserError(f"cannot make the temporary folder {place}: {error}") from error
    os.environ["TMPDIR"] = str(place)
    tempfile.tempdir = None  # the name is looked up again
    return place


def note_client_processes(folder: Folder) -> None:
    """Note the processes of W&B's client: if this one is killed, they live for seconds and send what they have."""
    processes = []
    for pid in list_children():
        with contextlib.suppress(OSError):
            processes.append(Process.identify(pid))
    write_json(_note_file(folder), read_json(_note_file(folder)) | {"processes": processes})


def remove_scratch(folder: Folder) -> None:
    """Remove what is left of a tracking process that has ended: processes, temporary folder, unfinished offline run."""
    note = read_json(_note_file(folder))
    is_here = note.get("host") == os.uname().nodename  # another host's processes and disk cannot be reached
    if is_here:
        for pid, start in note.get("processes", []):
            Process(pid, start).kill()
    shutil.rmtree(name_staging_folder(folder), ignore_errors=True)
    if not is_here:
        return
    place = Path(str(note.get("path")))
    if place.name.startswith(PREFIX) and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    _note_file(folder).unlink(missing_ok=True)
