"""Temporary state of a tracking process: a lock, temporary folders, and the folder of an unfinished offline run.

W&B's client leaves temporary folders and sockets behind when it is killed. It therefore gets a separate temporary
folder, which is recorded in the run folder and removed by the process, by its owner, or by the next tracking process.
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
from common.runs.folder import RunFolder, read_json, write_json

PREFIX = "wandb-run-"  # of temporary folders; short, because the path of a socket has at most 107 characters


def name_staging_folder(folder: RunFolder) -> Path:
    """Return the folder in which an offline run of W&B is created.

    Its content does not count yet.
    """
    return folder.path / "wandb" / "unfinished"


def _record_file(folder: RunFolder) -> Path:
    return folder.path / "wandb" / "temporary.json"


@contextlib.contextmanager
def locked_tracking(folder: RunFolder, *, wait: bool = True) -> Iterator[bool]:
    """Let one process at a time forward a run's rows.

    Without `wait`, yield False if another one does.
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
    """Create and return a temporary folder for this process and its children. Raises UserError."""
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(4)}"
    record = {"path": str(path), "host": os.uname().nodename}
    write_json(_record_file(folder), record)  # before the folder exists: this process may be killed
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise UserError(f"cannot create the temporary folder {path}: {error}") from error
    os.environ["TMPDIR"] = str(path)
    tempfile.tempdir = None  # tempfile reads TMPDIR again
    return path


def note_client_processes(folder: RunFolder) -> None:
    """Record the processes of W&B's client: they outlive a killed tracking process and keep sending for seconds."""
    processes = []
    for pid in list_children():
        with contextlib.suppress(OSError):
            processes.append(Process.identify(pid))
    write_json(_record_file(folder), read_json(_record_file(folder)) | {"processes": processes})


def remove_scratch(folder: RunFolder) -> None:
    """Remove processes, temporary folder and unfinished offline run of a tracking process that has ended."""
    record = read_json(_record_file(folder))
    is_this_host = record.get("host") == os.uname().nodename  # processes and disk of other hosts are not accessible
    if is_this_host:
        for pid, start in record.get("processes", []):
            Process(pid, start).kill()
    shutil.rmtree(name_staging_folder(folder), ignore_errors=True)
    if not is_this_host:
        return
    path = Path(str(record.get("path")))
    if path.name.startswith(PREFIX) and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    _record_file(folder).unlink(missing_ok=True)
