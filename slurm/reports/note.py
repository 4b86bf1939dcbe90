"""The `note` command: replace the notes of a run. This module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.runs import description
from common.system.errors import UserError
from configs.fields import MAX_NOTES_LENGTH, check_short_text
from slurm.reports.selection import find_run


def main(args: argparse.Namespace) -> int:
    """Replace the notes of a run, and return the exit status. Raises UserError for invalid arguments."""
    folder = find_run(args.run or "", Path(args.runs_folder or "runs"))
    if args.text is None:
        raise UserError('TEXT is missing; set TEXT="..." to the new notes, or TEXT= to delete the notes')
    try:
        check_short_text(MAX_NOTES_LENGTH, args.text)
    except ValueError as error:
        raise UserError(f"TEXT: {error}") from None
    description.write_notes(folder, args.text)
    print(f"{folder.path.name}: {args.text}" if args.text else f"{folder.path.name}: deleted the notes")
    return 0
