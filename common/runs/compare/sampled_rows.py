"""Read the metric rows of a run for its curves, and only a sample of them from a long run.

The rows of a million steps take more than 100 MB, and a chart shows a few hundred points. From a large metrics.jsonl,
pairs of consecutive training rows are read at positions that are evenly spaced in the file. Further positions are
log-spaced, for a logarithmic axis. All evaluations are read. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from common.runs.compare.metric_curves import is_evaluation
from common.runs.folder import AttemptPart, RunFolder
from common.runs.metrics_rows import parse_rows

MAX_COMPLETE_BYTES = 4 << 20  # all rows of a file of at most this size are read
EVEN_POSITIONS = 800
LOG_SPACED_POSITIONS = 160
FIRST_LOG_SPACED_BYTE = 64
ROWS_PER_POSITION = 2  # the speed is computed from consecutive rows
MAX_EVALUATIONS = 2000
EVALUATION_MARK = b'"test_'  # begins the name of a value that only evaluations have
BLOCK_BYTES = 1 << 20
SHORT_READ_BYTES = 1 << 10  # contains several rows of usual length

Row = dict[str, Any]


def read_rows_for_curves(folder: RunFolder) -> Iterator[Row | None]:
    """Yield the rows of a run that its curves need, or None where training rows were left out.

    Of an attempt whose rows are sampled, the evaluations follow the training rows.
    """
    for part in folder.list_attempt_parts():
        file = part.attempt.metrics_file
        if not file.exists() or file.stat().st_size <= MAX_COMPLETE_BYTES:
            yield from part.read_rows()
        else:
            with open(file, "rb") as content:
                yield from sample_rows(part, content)


def sample_rows(part: AttemptPart, file: BinaryIO) -> Iterator[Row | None]:
    """Yield a sample of the rows of one attempt, as described in `read_rows_for_curves`."""
    end = find_end(file, part.rows)
    for lines in read_pairs(file, end):
        yield None
        for row in parse_rows(lines):
            counts = row is not None and not is_evaluation(row) and part.includes_step(row["global_step"])
            yield row if counts else None

    yield None
    for row in parse_rows(read_evaluation_lines(file, end)):
        if row is not None and is_evaluation(row) and part.includes_step(row["global_step"]):
            yield row


def find_end(file: BinaryIO, line_count: int | None) -> int:
    """Return the position behind the first `line_count` lines of a file, or the size of the file for None."""
    if line_count is None:
        return file.seek(0, os.SEEK_END)
    file.seek(0)
    end = 0
    while line_count > 0 and (block := file.read(BLOCK_BYTES)):
        lines = block.splitlines(keepends=True)[:line_count]
        line_count -= sum(line.endswith(b"\n") for line in lines)
        end += sum(map(len, lines))
    return end


def choose_positions(end: int) -> list[int]:
    """Return the positions in a file at which rows are read, in ascending order."""
    even = np.linspace(0, end, EVEN_POSITIONS, endpoint=False)
    log_spaced = np.geomspace(FIRST_LOG_SPACED_BYTE, end, LOG_SPACED_POSITIONS, endpoint=False)
    return list(map(int, np.unique(np.concatenate([even, log_spaced]).astype(np.int64))))


def read_pairs(file: BinaryIO, end: int) -> Iterator[list[str]]:
    """Yield a few consecutive lines at each position, and the last lines before `end`. No line is yielded twice."""
    read_until = 0
    for position in choose_positions(end):
        if position >= read_until:
            start, lines = read_lines(file, position, end, ROWS_PER_POSITION)
            read_until = start + sum(map(len, lines))
            yield decode_lines(lines)

    position = max(read_until, end - BLOCK_BYTES)
    _, lines = read_lines(file, position, end)
    yield decode_lines(lines[-ROWS_PER_POSITION:])


def read_lines(file: BinaryIO, position: int, end: int, count: int | None = None) -> tuple[int, list[bytes]]:
    """Return the first `count` complete lines that start at or behind a position, and where the first one starts.

    Without `count`, returns all complete lines before `end`. Fewer lines are returned if fewer precede `end`.
    """
    before = max(0, position - 1)  # a line starts at the position if the byte before it is a line break
    size = SHORT_READ_BYTES if count else end - before
    while True:
        file.seek(before)
        text = file.read(min(size, end - before))
        start = text.find(b"\n") + 1 if position else 0
        lines = [line for line in text[start:].splitlines(keepends=True) if line.endswith(b"\n")]
        has_enough = count is not None and len(lines) >= count and (start or not position)
        if has_enough or before + size >= end:
            break
        size *= 4  # the rows are longer than usual
    return before + start, lines[:count]


def read_evaluation_lines(file: BinaryIO, end: int) -> list[str]:
    """Return the lines before `end` that contain an evaluation, or MAX_EVALUATIONS of them."""
    positions = find_evaluations(file, end)
    if len(positions) > MAX_EVALUATIONS:
        chosen = np.linspace(0, len(positions) - 1, MAX_EVALUATIONS).astype(np.int64)
        positions = [positions[number] for number in chosen]
    lines = []
    for position in positions:
        lines += read_lines(file, position, end, 1)[1]
    return decode_lines(lines)


def find_evaluations(file: BinaryIO, end: int) -> list[int]:
    """Return the position of each complete line before `end` that contains an evaluation."""
    positions = []
    file.seek(0)
    block_start = 0
    while block := file.read(min(BLOCK_BYTES, end - block_start)):
        last_break = block.rfind(b"\n") + 1
        if not last_break:  # a line longer than a block is no row
            block_start += len(block)
            continue
        mark = block.find(EVALUATION_MARK, 0, last_break)
        while mark >= 0:
            positions.append(block_start + block.rfind(b"\n", 0, mark) + 1)
            mark = block.find(EVALUATION_MARK, block.index(b"\n", mark), last_break)
        block_start += last_break
        file.seek(block_start)
    return positions


def decode_lines(lines: Sequence[bytes]) -> list[str]:
    """Return lines as text. Invalid bytes are replaced."""
    return [line.decode(errors="replace") for line in lines]
