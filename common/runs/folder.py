"""The run folder: names, attempts, atomic writes, reading it back. Imports neither torch nor W&B.

runs/<name>-<time>-<4 hex>/
  config.yaml          resolved settings; the run can be repeated from this file alone
  meta.json            code, versions, hosts, argv, data checksum, history; unknown values are null
  code/                the source that this run executes, untracked files included, and its checksums in SHA256SUMS
  attempts/0001/       one folder per attempt; ranks write only here
    claim.json         the process or job that trains here (claims.py)
    attempt.json       the attempt and step that it resumes; parent null for a new run
    changed.json       where it has other settings than config.yaml: then and now
    result.json        state and numbers at its end, once a later attempt has begun
    passed_on.json     what W&B has of it: lines of metrics.jsonl and media.jsonl
    world.json         ranks, hosts, device, backend
    logs/rank-0.log    one file per rank
    heartbeat-0.json   one file per rank: step, time, the seconds of its steps until backward begins, and its samples
    metrics.jsonl      one JSON object per logged step
    checkpoints/       see common/checkpoint/storage.py
  .private*/           the key of launch.tls=true while ranks connect; that of local runs lies in the attempt
  wandb/               the W&B directory; of an online run journal.jsonl: W&B's step numbers and the rows behind them
  result.json          final numbers and the reason for the end
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.core.errors import UserError
from common.runs.metrics_rows import parse_rows

BLOCK = 1 << 20  # characters of metrics that are read at once
CLAIM = "claim.json"
STALE_DRAFT_SECONDS = 60.0
MODEL, MODEL_FACTS = "model.safetensors", "model.json"  # the trained model of a finished run
FILES_OF_RANKS = (
    CLAIM,
    "attempt.json",
    "world.json",
    "generations.json",
    "heartbeat-*.json",
    "metrics.jsonl",
    "media.jsonl",
    "logs/rank-*.log",
    "checkpoints/**/*",
)
"""What an attempt's own processes write in its folder; tracking and reports write there as well."""


@contextlib.contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a UserError that names the remedy."""
    remedies = {
        errno.ENOSPC: "the disk is full; free space",
        errno.EDQUOT: "the disk quota is used up; free space",
        errno.EFBIG: "it would be larger than the limit on a file's size (ulimit -f); raise that",
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


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a small file so that a reader sees the old or the new text and nothing between.

    A durable one is on the disk, and stays there when the power fails, once this returns.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with disk_errors(path):
            beside.write_text(text)
            if durable:
                fsync_path(beside)
            beside.replace(path)
            if durable:
                fsync_path(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network disks have no such thing for folders
            raise
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically. Raises UserError."""
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")


def write_json_once(path: Path, value: Any) -> bool:
    """Write a value as JSON, atomically, unless the file exists; return whether it was written. Raises UserError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_json(draft, value)
    try:
        with disk_errors(path):
            os.link(draft, path)
    except FileExistsError:
        return False
    except UserError:  # a disk without hard links
        if path.exists():
            return False
        with disk_errors(path):
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty when the file is missing or cut off."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def remove_stale_drafts(attempts: Path) -> None:
    """Delete drafts and withdrawn attempts that a killed process left, once they are older than a minute."""
    for path in [*attempts.glob(".new-*"), *attempts.glob(".withdrawn-*")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_ctime > STALE_DRAFT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Part:
    """What counts of an attempt."""

    attempt: Folder
    last_step: int | None
    """Step at which a later attempt resumed it; None where all of it counts."""
    rows: int | None
    """Lines of its metrics that a later attempt took over; None for all."""

    def counts(self, step: int) -> bool:
        """Check whether what was logged for a step counts."""
        return self.last_step is None or step <= self.last_step


class Folder:
    """One run folder and, in it, one attempt."""

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

    @property
    def reference(self) -> str:
        """Text to type for RUN= or RUNS=: the id, or the path of a run that is not in runs/ here."""
        path = self.path.absolute()
        return path.name if path.parent == Path("runs").absolute() else str(path)

    def claim_attempt(self, claim: Mapping[str, Any] | None = None) -> Folder:
        """Create the folder of the next attempt, with its claim: two that start at once get one each.

        It appears with its content, by one rename. Raises UserError.
        """
        attempts = self.path / "attempts"
        remove_stale_drafts(attempts)
        draft = attempts / f".new-{secrets.token_hex(4)}"
        with disk_errors(self.path):
            attempts.mkdir(exist_ok=True)
            try:
                (draft / "logs").mkdir(parents=True)
                if claim is not None:
                    write_json(draft / CLAIM, claim)
                return self._publish_attempt(draft)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def _publish_attempt(self, draft: Path) -> Folder:
        number = max((a.number for a in self.attempts()), default=0) + 1
        while True:
            claimed = Folder(self.path, number)
            try:
                if not claimed.attempt.exists():  # an empty one would be replaced
                    draft.rename(claimed.attempt)
                    return claimed
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            number += 1

    def withdraw_attempt(self) -> None:
        """Delete the folder of this attempt, which disappears with its claim, by one rename."""
        withdrawn = self.attempt.with_name(f".withdrawn-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self.attempt.rename(withdrawn)
        shutil.rmtree(withdrawn, ignore_errors=True)

    def attempts(self) -> list[Folder]:
        """All attempts, oldest first."""
        names = [path.name for path in self.path.glob("attempts/[0-9]*")]
        return [Folder(self.path, number) for number in sorted(int(name) for name in names if name.isdecimal())]

    @property
    def is_superseded(self) -> bool:
        """True where a newer attempt exists: then this one no longer counts."""
        return any(attempt.number > self.number for attempt in self.attempts())

    def write_parent(self, parent: int | None, step: int, rows: int | None = None) -> None:
        """Record which attempt, up to which step, this one resumes; None and 0 for a new run. Raises UserError.

        `rows` are the rows of metrics that the parent had written by then. Without this record the attempt has not
        begun to train, and none resumes it.
        """
        text = json.dumps({"parent": parent, "step": step, "rows": rows}) + "\n"
        write_atomic(self.attempt / "attempt.json", text, durable=True)
        with disk_errors(self.attempt):
            fsync_path(self.attempt.parent)

    def trace_attempts(self) -> list[tuple[Folder, int | None]]:
        """Return the attempts that count, newest first, each with its last step that counts (None: all of them).

        An attempt counts up to the step at which the next one resumed it; an older one that none resumed, not at all.
        """
        begun = [attempt for attempt in self.attempts() if attempt.parent_record is not None]
        if not begun:  # nothing was recorded: the newest attempt that trained counts alone
            begun = [attempt for attempt in self.attempts() if attempt.metrics_file.exists()]
        link: tuple[Folder, int | None] | None = (begun[-1], None) if begun else None
        found: list[tuple[Folder, int | None]] = []
        while link is not None:
            found.append(link)
            attempt, bound = link
            parent, step = attempt.parent_record or (None, 0)
            older = parent is not None and parent < attempt.number  # a damaged file must not lead in a circle
            link = (Folder(self.path, parent), step if bound is None else min(step, bound)) if older else None  # type: ignore[arg-type]
        return found

    @property
    def parent_record(self) -> tuple[int | None, int] | None:
        """Parent and step that `write_parent` recorded, (None, 0) for a fresh start; None before training began."""
        note = read_json(self.attempt / "attempt.json")
        parent, step = note.get("parent", ""), note.get("step")
        return (parent, step) if isinstance(parent, int | None) and isinstance(step, int) else None

    @property
    def experiment(self) -> str:
        """Name of the experiment, taken from the folder's name."""
        return self.path.name.rsplit("-", 3)[0]

    @property
    def attempt(self) -> Path:
        return self.path / "attempts" / f"{self.number:04d}"

    @property
    def metrics_file(self) -> Path:
        return self.attempt / "metrics.jsonl"

    def log_file(self, rank: int) -> Path:
        return self.attempt / "logs" / f"rank-{rank}.log"

    def write_heartbeat(self, rank: int, step: int, time: float, **measured: float | None) -> None:
        """Write a rank's newest step, the time since 1970, and what is measured of its steps. Raises UserError."""
        beat = {"step": step, "time": time} | {name: value for name, value in measured.items() if value}
        write_json(self.attempt / f"heartbeat-{rank}.json", beat)

    def find_last_write(self) -> float:
        """Return the time since 1970 at which a rank last wrote a file of this attempt; 0 where none has."""
        newest = 0.0
        for pattern in FILES_OF_RANKS:
            for path in self.attempt.glob(pattern):
                with contextlib.suppress(OSError):  # deleted meanwhile
                    newest = max(newest, path.stat().st_mtime)
        return newest

    def metrics(self) -> list[dict[str, Any]]:
        """Return all complete rows of the run, oldest first, over all attempts that count; each step once.

        A line cut off by a crash is left out.
        """
        return list(self.read_rows())

    def find_last_step(self) -> int:
        """Return the last step that has a row of metrics; 0 where none has."""
        return max((row["global_step"] for row in self.read_rows()), default=0)

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `metrics` one by one, so that a long run need not fit into memory."""
        for part in self.list_parts():
            rows = itertools.islice(part.attempt.parse_own_rows(), part.rows)
            yield from (row for row in rows if row and part.counts(row["global_step"]))

    def list_parts(self) -> list[Part]:
        """Return what counts of each attempt that counts, oldest first."""
        chain = self.trace_attempts()
        parts = []
        for i, (attempt, last_step) in enumerate(chain):
            # an evaluation after the last step that counts is repeated, so steps alone do not decide
            rows = read_json(chain[i - 1][0].attempt / "attempt.json").get("rows") if i else None
            parts.append(Part(attempt, last_step, rows if isinstance(rows, int) and rows >= 0 else None))
        return parts[::-1]

    def read_own_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the complete rows of this attempt only."""
        return (row for row in self.parse_own_rows() if row)

    def parse_own_rows(self) -> Iterator[dict[str, Any] | None]:
        """Yield the row of each line of this attempt's metrics; None for a line that is cut off or damaged."""
        with contextlib.suppress(FileNotFoundError), open(self.metrics_file, errors="replace") as file:
            while lines := file.readlines(BLOCK):
                yield from parse_rows(lines)

    def find_damaged_lines(self) -> list[int]:
        """Return the numbers, from 1, of damaged lines of this attempt's metrics; a last one cut off does not count."""
        found, number = list[int](), 0
        for number, row in enumerate(self.parse_own_rows(), 1):
            if row is None:
                found.append(number)
        if found and found[-1] == number and not self.metrics_file.read_bytes().endswith(b"\n"):
            found.pop()
        return found

    @property
    def result(self) -> dict[str, Any]:
        return read_json(self.path / "result.json")

    def retire_result(self) -> Path | None:
        """Move the result of the attempt before into its own folder, as this one begins; return where it is then.

        Raises UserError.
        """
        file = self.path / "result.json"
        earlier = [one.attempt / file.name for one in self.attempts() if not self.number or one.number < self.number]
        with disk_errors(file), contextlib.suppress(FileNotFoundError):
            if earlier and not earlier[-1].exists():
                return file.replace(earlier[-1])
            file.unlink()  # of an attempt that ended before it had a folder
        return None
