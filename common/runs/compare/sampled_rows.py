"""Read the metric rows of a run for its curves, and only a sample of them from a long run.

The rows of a million steps take more than 100 MB, and a chart shows a few hundred points. From a large metrics.jsonl,
a few consecutive rows are read at positions that are evenly spaced in the file. Further positions are log-spaced,
for a logarithmic axis. Evaluations, and rows with other values that most rows lack, are all read, up to MAX_RARE_ROWS
for each value. This module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from common.runs.compare.metric_curves import is_evaluation
from common.runs.folder import AttemptPart, RunFolder
from common.runs.metrics_rows import parse_rows

MAX_COMPLETE_BYTES = 4 << 20  # all rows of a file of at most this size are read
EVEN_POSITIONS = 400
LOG_SPACED_POSITIONS = 80
FIRST_LOG_SPACED_BYTE = 64
ROWS_PER_POSITION = 4
MAX_RARE_ROWS = 2000
EVALUATION_TEXT = b', "test_'  # start of the names of the values of an evaluation, after another value
FIRST_BYTES = 1 << 18  # all rows in this part of a file are searched for values that most rows lack
BLOCK_BYTES = 1 << 20
SHORT_READ_BYTES = 1 << 10  # contains several rows of usual length

Row = dict[str, Any]
Lines = dict[int, bytes]
"""Lines of a file by their position. Each line ends with a line break."""


def read_rows_for_curves(folder: RunFolder) -> Iterator[Row]:
    """Yield the rows of a run that its curves need, in their order."""
    for part in folder.list_attempt_parts():
        file = part.attempt.metrics_file
        if not file.exists() or file.stat().st_size <= MAX_COMPLETE_BYTES:
            yield from part.read_rows()
        else:
            with open(file, "rb", buffering=0) as content:  # a buffer would read more than a few rows
                yield from sample_rows(part, content)


def sample_rows(part: AttemptPart, file: BinaryIO) -> Iterator[Row]:
    """Yield a sample of the rows of one attempt that count for the run, in their order."""
    end = find_end(file, part.rows)
    lines = read_groups(file, end)
    for text in (EVALUATION_TEXT, *find_rare_texts(file, end, lines)):
        lines |= read_lines_with_text(file, end, text)
    for row in parse_lines(lines):
        if row is not None and part.includes_step(row["global_step"]):
            yield row


def find_end(file: BinaryIO, line_count: int | None) -> int:
    """Return the position after the first `line_count` lines of a file, or the size of the file for None."""
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
    log_spaced = np.geomspace(FIRST_LOG_SPACED_BYTE, max(end, FIRST_LOG_SPACED_BYTE), LOG_SPACED_POSITIONS)
    positions = np.unique(np.concatenate([even, log_spaced]).astype(np.int64))
    return [int(position) for position in positions if position < end]


def read_groups(file: BinaryIO, end: int) -> Lines:
    """Return a few consecutive lines at each position, and the last lines before `end`."""
    lines: Lines = {}
    read_until = 0
    for position in choose_positions(end):
        if position >= read_until:
            group = read_lines(file, position, end, ROWS_PER_POSITION)
            lines |= group
            read_until = max((start + len(line) for start, line in group.items()), default=read_until)

    last_lines = read_lines(file, max(read_until, end - BLOCK_BYTES), end)
    return lines | dict(list(last_lines.items())[-ROWS_PER_POSITION:])


def read_lines(file: BinaryIO, position: int, end: int, count: int | None = None) -> Lines:
    """Return the first `count` complete lines that start at or after a position and end before `end`.

    Without `count`, returns all of these lines.
    """
    before = max(0, position - 1)  # a line starts at the position if the byte before it is a line break
    size = SHORT_READ_BYTES if count else end - before
    while True:
        file.seek(before)
        text = file.read(min(size, end - before))
        start = text.find(b"\n") + 1 if position else 0
        complete = [line for line in text[start:].splitlines(keepends=True) if line.endswith(b"\n")]
        has_enough = count is not None and len(complete) >= count and (start or not position)
        if has_enough or before + size >= end:
            break
        size *= 4  # the rows are longer than usual
    lines: Lines = {}
    for line in complete[:count]:
        lines[before + start] = line
        start += len(line)
    return lines


def parse_lines(lines: Lines) -> list[Row | None]:
    """Return the rows in lines, in the order of their positions. For a damaged line, the row is None."""
    return parse_rows([lines[position].decode(errors="replace") for position in sorted(lines)])


def find_rare_texts(file: BinaryIO, end: int, sample: Lines) -> list[bytes]:
    """Return the names of values that less than half of the rows contain, as they are written in the file.

    The rows in the sample and at the start of the file are counted. A sample of a long file may lack a value that every
    1,000th row contains. Values of evaluations are not counted.
    """
    lines = sample | read_lines(file, 0, min(end, FIRST_BYTES))
    rows = [row for row in parse_lines(lines) if row is not None and not is_evaluation(row)]
    counts = Counter[str]()
    for row in rows:
        counts.update(row.keys())
    return [f"{json.dumps(name)}:".encode() for name, count in counts.items() if 2 * count < len(rows)]


def read_lines_with_text(file: BinaryIO, end: int, text: bytes) -> Lines:
    """Return the complete lines before `end` that contain a text, or MAX_RARE_ROWS of them."""
    positions = find_lines_with_text(file, end, text)
    if len(positions) > MAX_RARE_ROWS:
        indexes = np.linspace(0, len(positions) - 1, MAX_RARE_ROWS).astype(np.int64)
        positions = [positions[index] for index in indexes]
    lines: Lines = {}
    for position in positions:
        lines |= read_lines(file, position, end, 1)
    return lines


def find_lines_with_text(file: BinaryIO, end: int, text: bytes) -> list[int]:
    """Return the position of each complete line before `end` that contains a text."""
    positions = []
    file.seek(0)
    block_start = 0
    while block := file.read(min(BLOCK_BYTES, end - block_start)):
        last_break = block.rfind(b"\n") + 1
        if not last_break:  # a line that is longer than a block is not a row
            block_start += len(block)
            continue
        text_start = block.find(text, 0, last_break)
        while text_start >= 0:
            positions.append(block_start + block.rfind(b"\n", 0, text_start) + 1)
            text_start = block.find(text, block.index(b"\n", text_start), last_break)
        block_start += last_break
        file.seek(block_start)
    return positions
