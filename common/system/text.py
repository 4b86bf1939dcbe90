"""Format text for messages, and read system files and logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 rank`, `2 ranks`, `2 processes` or `2 microbatches`."""
    if count == 1:
        return f"1 {noun}"
    suffix = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{suffix}"


def format_ranks(numbers: Sequence[int]) -> str:
    """Format the numbers of ranks, such as `rank 1` or `ranks 0, 2`."""
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, numbers))}"


def format_duration(seconds: float) -> str:
    """Format a duration in its largest suitable unit, such as `95 s`, `29 min`, `5 h` or `3 d`."""
    for unit_seconds, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_seconds:
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{seconds:.0f} s"


def read_end_of_file(path: Path, size: int = 1 << 18) -> str:
    """Return the last `size` bytes of a log as text, or an empty string if the log cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_text_or_empty(path: str) -> str:
    """Return the text of a file, or an empty string if the file cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
