"""Words of messages, and the text of system files."""

from __future__ import annotations

from pathlib import Path


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, as in `1 rank`, `2 ranks`, `2 processes` and `2 microbatches`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def format_duration(seconds: float) -> str:
    """Format a duration in its largest unit, as `95 s`, `29 min`, `5 h` or `3 d`."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def read_tail(path: Path, size: int = 1 << 18) -> str:
    """Return the last `size` bytes of a log as text; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_or_empty(path: str) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
