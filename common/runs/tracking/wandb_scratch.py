"""Temporary state of a tracking process: a lock, a temporary folder, and the folder of an unfinished offline run.

If the W&B client is killed, it leaves temporary folders and sockets behind. Each tracking process therefore uses a
separate temporary folder, whose path is recorded in the run folder. The temporary folder is removed by the tracking
process, by the process that started it, or by the next tracking process.
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

from common.runs.folder import RunFolder, read_json, write_json
from common.system.errors import UserError
from common.system.processes import Process, list_children

PREFIX = "wandb-run-"  # prefix of folder names; it is short because a socket path is limited to 107 characters


def get_staging_folder(folder: RunFolder) -> Path:
    """Return the folder in which an offline W&B run is created.

    An offline run is complete only after it has been moved from this folder to its final path.
    """
    return folder.path / "wandb" / "unfinished"


def _record_file(folder: RunFolder) -> Path:
    return folder.path / "wandb" / "temporary.json"


@contextlib.contextmanager
def hold_tracking_lock(folder: RunFolder, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock so that only one process at a time sends the rows of a run to W&B.

    Yields True once the lock is held. If `wait` is false, yields False if another process holds the lock.
    """
    with open(folder.path / "wandb" / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:  # a network disk may not support locks
            pass
        yield True


def open_temporary_folder(folder: RunFolder) -> Path:
    """Create and return a temporary folder for this process and its children. Raises UserError on failure."""
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(4)}"
    record = {"path": str(path), "host": os.uname().nodename}
    write_json(_record_file(folder), record)  # written before the folder exists, because this process may be killed
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise UserError(f"cannot create the temporary folder {path}: {error}") from error
    os.environ["TMPDIR"] = str(path)
    tempfile.tempdir = None  # makes tempfile read TMPDIR again
    return path


def record_client_processes(folder: RunFolder) -> None:
    """Record the processes of the W&B client.

    If the tracking process is killed, these processes continue to send data for several seconds, unless
    `remove_temporary_state` kills them.
    """
    processes = []
    for pid in list_children():
        with contextlib.suppress(OSError):
            processes.append(Process.identify(pid))
    write_json(_record_file(folder), read_json(_record_file(folder)) | {"processes": processes})


def remove_temporary_state(folder: RunFolder) -> None:
    """Kill the processes and delete the folders that an ended tracking process has left behind."""
    record = read_json(_record_file(folder))
    # This host cannot access the processes and temporary folders of other hosts.
    is_this_host = record.get("host") == os.uname().nodename
    if is_this_host:
        for pid, start in record.get("processes", []):
            Process(pid, start).kill()
    shutil.rmtree(get_staging_folder(folder), ignore_errors=True)
    if not is_this_host:
        return
    path = Path(str(record.get("path")))
    if path.name.startswith(PREFIX) and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    _record_file(folder).unlink(missing_ok=True)
