"""Create, write and read run folders and their attempts. This module imports neither torch nor wandb.

runs/<name>-<time>-<4 hex>/
  config.yaml          settings with which the run was started
  resolved.yaml        settings that the run has measured or replaced; they override config.yaml
  meta.json            code, versions, hosts, argv, data checksum, history; unknown values are null
  code/                the source code that this run executes, with untracked files; SHA256SUMS lists the checksums
  attempts/0001/       one folder per attempt; ranks write only here
    claim.json         the process or job that runs this attempt (see claims.py)
    attempt.json       the attempt and step from which this attempt resumed, and the total number of steps
    changed.json       settings that differ from config.yaml, each with its old and new value
    result.json        final state and numbers of this attempt, moved here when a later attempt starts
    passed_on.json     number of lines of metrics.jsonl and media.jsonl that W&B has received
    world.json         ranks, hosts, device and backend
    logs/rank-0.log    one file per rank
    heartbeat-0.json   one file per rank: step, time, seconds per step before backward, and samples
    failure-0.json     one file per rank that failed: cause, message and time (see failures.py)
    metrics.jsonl      one JSON object per logged step
    checkpoints/       see common/checkpoint/storage.py
  .private*/           TLS key while ranks connect (launch.tls=true); local runs store the key in the attempt folder
  wandb/               W&B directory; in online runs, journal.jsonl maps the step numbers of W&B to rows
  result.json          final numbers, and why the run ended
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

from common.runs.metrics_rows import parse_rows
from common.system import foreign_text
from common.system.causes import Cause
from common.system.disk_problems import DISK_ERRORS
from common.system.errors import UserError

BLOCK_CHARACTERS = 1 << 20  # number of characters of metrics.jsonl to read at a time
CLAIM = "claim.json"
STALE_DRAFT_SECONDS = 60.0
MODEL_FILE = "model.safetensors"  # the trained model of a finished run
MODEL_FACTS_FILE = "model.json"
FILES_OF_RANKS = (
    CLAIM,
    "attempt.json",
    "world.json",
    "generations.json",
    "heartbeat-*.json",
    "failure-*.json",
    "metrics.jsonl",
    "media.jsonl",
    "logs/rank-*.log",
    "checkpoints/**/*",
)
"""Patterns of the files that ranks write to the attempt's folder. Tracking and reports write other files."""


@contextlib.contextmanager
def convert_disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError caused by a full, read-only or protected disk to a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # numpy raises such an error if the disk is full
            raise UserError(f"cannot write {path}: {error}; free up space", cause=Cause.DISK_FULL) from error
        if error.errno not in DISK_ERRORS:
            raise
        text = f"cannot write {path}: {DISK_ERRORS[error.errno]}"
        raise UserError(text, cause=foreign_text.classify_error(error)) from error


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a small text file atomically. Raises UserError if writing fails.

    Readers see either the old text or the complete new text. If `durable` is true, the new text survives a power
    failure after this function has returned.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with convert_disk_errors(path):
            draft.write_text(text)
            if durable:
                fsync_path(draft)
            draft.replace(path)
            if durable:
                fsync_path(path.parent)
    finally:
        with contextlib.suppress(OSError):  # a read-only disk refuses this too, and contains no draft
            draft.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk. Raises OSError if flushing fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network disks cannot flush folders
            raise
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically as JSON. Raises UserError if writing fails."""
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")


def write_json_once(path: Path, value: Any) -> bool:
    """Write a value atomically as JSON if the file does not exist yet.

    Returns whether the file was written. Raises UserError if writing fails.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_json(draft, value)
    try:
        with convert_disk_errors(path):
            os.link(draft, path)
    except FileExistsError:
        return False
    except UserError:  # the disk may not support hard links
        if path.exists():
            return False
        with convert_disk_errors(path):
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict if the file is missing or damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def remove_stale_drafts(attempts: Path) -> None:
    """Delete drafts and withdrawn attempts left by killed processes if they are older than STALE_DRAFT_SECONDS."""
    for path in [*attempts.glob(".new-*"), *attempts.glob(".withdrawn-*")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_ctime > STALE_DRAFT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class AttemptPart:
    """The part of an attempt that counts for the run. Steps that a later attempt repeated do not count."""

    attempt: RunFolder
    last_step: int | None
    """Step from which a later attempt resumed, or None if all steps of this attempt count."""
    rows: int | None
    """Number of lines at the start of metrics.jsonl that count for the run, or None if all lines count."""

    def includes_step(self, step: int) -> bool:
        """Return whether the rows of a step count for the run."""
        return self.last_step is None or step <= self.last_step

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the complete rows that count for the run."""
        rows = itertools.islice(self.attempt.parse_attempt_rows(), self.rows)
        return (row for row in rows if row and self.includes_step(row["global_step"]))


class RunFolder:
    """A run folder and the number of one of its attempts. The number is 0 if no attempt is selected."""

    def __init__(self, path: Path, attempt: int = 0) -> None:
        self.path = path
        self.number = attempt

    @classmethod
    def create(cls, root: Path, name: str, config: str) -> RunFolder:
        """Create a run folder that contains the config. Raises UserError, and leaves no folder, if this fails."""
        if os.pathsep in str(root.absolute()):  # a resumed run finds its source code through PYTHONPATH
            raise UserError(f"runs={root}: the absolute path must not contain {os.pathsep!r}; use another folder")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        path = root / f"{name}-{stamp}-{secrets.token_hex(2)}"
        with convert_disk_errors(path):
            while path.exists():
                path = root / f"{name}-{stamp}-{secrets.token_hex(2)}"
            path.mkdir(parents=True)
        try:
            write_atomic(path / "config.yaml", config)
            return cls(path)
        except UserError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @property
    def reference(self) -> str:
        """Run id for RUN= or RUNS= in a make command, or the path of a run outside ./runs."""
        path = self.path.absolute()
        return path.name if path.parent == Path("runs").absolute() else str(path)

    def claim_attempt(self, claim: Mapping[str, Any] | None = None) -> RunFolder:
        """Create the next attempt's folder, which contains the claim. Raises UserError if writing fails.

        A single rename makes the complete folder visible. Concurrent callers get different attempts.
        """
        attempts = self.path / "attempts"
        remove_stale_drafts(attempts)
        draft = attempts / f".new-{secrets.token_hex(4)}"
        with convert_disk_errors(self.path):
            attempts.mkdir(exist_ok=True)
            try:
                (draft / "logs").mkdir(parents=True)
                if claim is not None:
                    write_json(draft / CLAIM, claim)
                return self._publish_attempt(draft)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def _publish_attempt(self, draft: Path) -> RunFolder:
        number = max((attempt.number for attempt in self.list_attempts()), default=0) + 1
        while True:
            new_attempt = RunFolder(self.path, number)
            try:
                if not new_attempt.attempt_folder.exists():  # rename would replace an empty folder
                    draft.rename(new_attempt.attempt_folder)
                    return new_attempt
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            number += 1

    def withdraw_attempt(self) -> None:
        """Delete the folder of this attempt. A single rename first hides the folder and its claim."""
        withdrawn = self.attempt_folder.with_name(f".withdrawn-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self.attempt_folder.rename(withdrawn)
        shutil.rmtree(withdrawn, ignore_errors=True)

    def list_attempts(self) -> list[RunFolder]:
        """Return all attempts, oldest first."""
        names = [path.name for path in self.path.glob("attempts/[0-9]*")]
        numbers = sorted(int(name) for name in names if name.isdecimal())
        return [RunFolder(self.path, number) for number in numbers]

    @property
    def is_superseded(self) -> bool:
        """Whether a newer attempt exists and therefore replaces this attempt."""
        return any(attempt.number > self.number for attempt in self.list_attempts())

    def record_parent_attempt(
        self, parent: int | None, step: int, rows: int | None = None, total_steps: int | None = None
    ) -> None:
        """Record the attempt and step from which this attempt resumes. Raises UserError if writing fails.

        For a new run, `parent` is None and `step` is 0. `rows` is the number of metric rows that the parent had written
        at that step. `total_steps` is the number of steps of the whole run. An attempt without this record has not
        started to train, and no other attempt resumes from it.
        """
        record = {"parent": parent, "step": step, "rows": rows, "total_steps": total_steps}
        text = json.dumps(record) + "\n"
        write_atomic(self.attempt_folder / "attempt.json", text, durable=True)
        with convert_disk_errors(self.attempt_folder):
            fsync_path(self.attempt_folder.parent)

    def trace_attempts(self) -> list[tuple[RunFolder, int | None]]:
        """Return the attempts that count toward the run, newest first, each with its last step that counts.

        An attempt counts up to the step from which the next attempt resumed. The step is None if all steps count. An
        older attempt from which no other attempt resumed does not count.
        """
        started = [attempt for attempt in self.list_attempts() if attempt.parent_record is not None]
        if not started:  # without records, only the newest attempt that trained counts
            started = [attempt for attempt in self.list_attempts() if attempt.metrics_file.exists()]
        chain: list[tuple[RunFolder, int | None]] = []
        attempt = started[-1] if started else None
        last_step: int | None = None
        while attempt is not None:
            chain.append((attempt, last_step))
            parent, step = attempt.parent_record or (None, 0)
            if parent is None or parent >= attempt.number:  # a damaged record must not cause an endless loop
                break
            attempt = RunFolder(self.path, parent)
            last_step = step if last_step is None else min(step, last_step)
        return chain

    @property
    def parent_record(self) -> tuple[int | None, int] | None:
        """Parent and step as written by `record_parent_attempt`, or None if training has not started.

        For a new run, the parent is None and the step is 0.
        """
        record = read_json(self.attempt_folder / "attempt.json")
        parent = record.get("parent", "")
        step = record.get("step")
        return (parent, step) if isinstance(parent, int | None) and isinstance(step, int) else None

    @property
    def experiment(self) -> str:
        """Name of the experiment, derived from the folder name."""
        return self.path.name.rsplit("-", 3)[0]

    @property
    def attempt_folder(self) -> Path:
        return self.path / "attempts" / f"{self.number:04d}"

    @property
    def metrics_file(self) -> Path:
        return self.attempt_folder / "metrics.jsonl"

    def log_file(self, rank: int) -> Path:
        return self.attempt_folder / "logs" / f"rank-{rank}.log"

    def write_heartbeat(self, rank: int, step: int, time: float, **measured: float | None) -> None:
        """Write the newest step of a rank, the time in seconds since 1970, and measurements. Raises UserError."""
        beat = {"step": step, "time": time}
        beat |= {name: number for name, number in measured.items() if number}
        write_json(self.attempt_folder / f"heartbeat-{rank}.json", beat)

    def find_last_write_time(self) -> float:
        """Return when a rank last wrote a file of this attempt, in seconds since 1970, or 0 if no file exists."""
        newest = 0.0
        for pattern in FILES_OF_RANKS:
            for path in self.attempt_folder.glob(pattern):
                with contextlib.suppress(OSError):  # the file was deleted in the meantime
                    newest = max(newest, path.stat().st_mtime)
        return newest

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all complete metric rows of the run, oldest first, without repeated steps.

        The rows come from all attempts that count for the run. A line truncated by a crash is skipped.
        """
        return list(self.read_rows())

    def find_last_step(self) -> int:
        """Return the last step that has a metric row, or 0 if there are no rows."""
        return max((row["global_step"] for row in self.read_rows()), default=0)

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `read_metrics` one by one, without loading a long run into memory."""
        for part in self.list_attempt_parts():
            yield from part.read_rows()

    def list_attempt_parts(self) -> list[AttemptPart]:
        """Return the part of each attempt that counts toward the run, oldest first."""
        parts: list[AttemptPart] = []
        for attempt, last_step in self.trace_attempts():
            # The next attempt repeats an evaluation that followed the last step that counts. The number of rows
            # excludes the first copy of this evaluation.
            successor = read_json(parts[-1].attempt.attempt_folder / "attempt.json") if parts else {}
            rows = successor.get("rows")
            if not isinstance(rows, int) or rows < 0:
                rows = None
            parts.append(AttemptPart(attempt, last_step, rows))
        return parts[::-1]

    def read_attempt_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the complete rows of this attempt only."""
        return (row for row in self.parse_attempt_rows() if row)

    def parse_attempt_rows(self) -> Iterator[dict[str, Any] | None]:
        """Yield the row in each line of this attempt's metrics.jsonl, or None for a truncated or damaged line."""
        with contextlib.suppress(FileNotFoundError), open(self.metrics_file, errors="replace") as file:
            while lines := file.readlines(BLOCK_CHARACTERS):
                yield from parse_rows(lines)

    def find_damaged_lines(self) -> list[int]:
        """Return the line numbers, from 1, of damaged lines in metrics.jsonl, except a truncated last line."""
        damaged = []
        number = 0
        for number, row in enumerate(self.parse_attempt_rows(), 1):
            if row is None:
                damaged.append(number)
        if damaged and damaged[-1] == number and not self.metrics_file.read_bytes().endswith(b"\n"):
            damaged.pop()
        return damaged

    @property
    def result(self) -> dict[str, Any]:
        return read_json(self.path / "result.json")

    def move_result_of_previous_attempt(self) -> Path | None:
        """Move the result of the previous attempt into that attempt's folder when this attempt starts.

        Returns the new path, or None if no result was moved. Raises UserError if writing fails.
        """
        file = self.path / "result.json"
        earlier = [attempt for attempt in self.list_attempts() if not self.number or attempt.number < self.number]
        with convert_disk_errors(file), contextlib.suppress(FileNotFoundError):
            new_path = earlier[-1].attempt_folder / file.name if earlier else None
            if new_path is not None and not new_path.exists():
                return file.replace(new_path)
            file.unlink()  # the previous attempt ended before its folder was created
        return None
