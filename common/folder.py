"""The run folder: names, attempts, atomic writes, reading it back. Knows neither torch nor W&B.

runs/<name>-<time>-<4 hex>/
  config.yaml          resolved settings; the run can be repeated from this file alone
  meta.json            code, versions, hosts, argv, data checksum, history; unknown values are null
  code/                the source that this run executes, untracked files included
  attempts/0001/       one folder a start; ranks write only here
    world.json         processes, hosts, device, backend
    logs/rank-0.log    one file a rank
    heartbeat-0.json   one file a rank: step and time
    metrics.jsonl      one JSON object per logged step
  wandb/               the W&B directory
  result.json          final numbers and the reason for the end
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.config import UserError


@contextlib.contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a UserError that names the remedy."""
    remedies = {
        errno.ENOSPC: "the disk is full; free space",
        errno.EDQUOT: "the disk quota is used up; free space",
        errno.EROFS: "the disk is read-only; choose another folder",
        errno.EACCES: "no permission to write; choose another folder",
        errno.EPERM: "no permission to write; choose another folder",
        errno.ENOENT: "the folder does not exist or was deleted; choose another one",
        errno.ENOTDIR: "part of the path is a file; choose another folder",
    }
    try:
        yield
    except OSError as error:
        remedy = remedies.get(error.errno or 0)
        if error.errno is None:  # numpy's way to tell of a full disk
            remedy = f"{error}; free space"
        if remedy is None:
            raise
        raise UserError(f"cannot write {what}: {remedy}") from error


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new text and nothing between."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with disk_errors(path):
            beside.write_text(text)
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file is missing or cut off."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


class Folder:
    """One run folder and, in it, the attempt that this start writes to."""

    def __init__(self, path: Path, attempt: int = 0) -> None:
        self.path = path
        self.number = attempt

    @classmethod
    def create(cls, root: Path, name: str, config: str) -> Folder:
        """Make a new run folder with its resolved configuration; leaves nothing behind on failure."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        path = root / f"{name}-{stamp}-{secrets.token_hex(2)}"
        while path.exists():
            path = root / f"{name}-{stamp}-{secrets.token_hex(2)}"
        with disk_errors(path):
            path.mkdir(parents=True)
        try:
            write_atomic(path / "config.yaml", config)
            return cls(path)
        except UserError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def claim(self) -> Folder:
        """Claim the next attempt by an exclusive mkdir."""
        number = max((a.number for a in self.attempts()), default=0) + 1
        with disk_errors(self.path):
            (self.path / "attempts").mkdir(exist_ok=True)
            (self.path / "attempts" / f"{number:04d}").mkdir()
            claimed = Folder(self.path, number)
            (claimed.attempt / "logs").mkdir()
        return claimed

    def attempts(self) -> list[Folder]:
        """All attempts, oldest first."""
        found = sorted(self.path.glob("attempts/[0-9]*"))
        return [Folder(self.path, int(path.name)) for path in found]

    @property
    def experiment(self) -> str:
        """The experiment's name, out of the folder's."""
        return self.path.name.rsplit("-", 3)[0]

    @property
    def attempt(self) -> Path:
        return self.path / "attempts" / f"{self.number:04d}"

    @property
    def metrics_file(self) -> Path:
        return self.attempt / "metrics.jsonl"

    def log_file(self, rank: int) -> Path:
        return self.attempt / "logs" / f"rank-{rank}.log"

    def heartbeat(self, rank: int, step: int, time: float) -> None:
        write_json(self.attempt / f"heartbeat-{rank}.json", {"step": step, "time": time})

    def metrics(self) -> list[dict[str, Any]]:
        """All complete rows of the newest attempt; a line cut off by a crash is left out."""
        newest = self.attempts()[-1:]
        rows: list[dict[str, Any]] = []
        for attempt in newest:
            if not attempt.metrics_file.exists():
                continue
            for line in attempt.metrics_file.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
        return rows

    @property
    def result(self) -> dict[str, Any]:
        return read_json(self.path / "result.json")
