"""Notes and archive mark of a run, which a user adds to the run folder. This module does not import torch.

notes.txt    notes that replace the setting run.notes
archived     an empty file; `make status` and `make compare` leave out the run
"""

from __future__ import annotations

from common.runs.folder import RunFolder, convert_disk_errors, write_atomic
from common.system.text import read_text_or_empty

NOTES_FILE = "notes.txt"
ARCHIVE_MARK = "archived"


def make_printable(text: str) -> str:
    """Replace line breaks and other characters that cannot be printed, which a file may contain, by spaces."""
    return "".join(character if character.isprintable() else " " for character in text).strip()


def read_notes(folder: RunFolder, initial: str) -> str:
    """Return the notes of a run in one line. `initial` is the value of run.notes."""
    file = folder.path / NOTES_FILE
    return make_printable(read_text_or_empty(str(file)) if file.exists() else initial)


def write_notes(folder: RunFolder, text: str) -> None:
    """Replace the notes of a run. Raises UserError if writing fails."""
    write_atomic(folder.path / NOTES_FILE, f"{text}\n")


def is_archived(folder: RunFolder) -> bool:
    """Return whether a run is archived."""
    return (folder.path / ARCHIVE_MARK).exists()


def set_archived(folder: RunFolder, archived: bool) -> None:
    """Archive a run, or undo the archiving. Raises UserError if the run folder cannot be written."""
    mark = folder.path / ARCHIVE_MARK
    with convert_disk_errors(mark):
        if archived:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)
