"""The `archive` command: mark runs so that reports leave them out. This module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.runs import description
from common.system.errors import UserError
from common.system.text import format_count
from slurm.arguments import parse_zero_or_one
from slurm.reports import selection
from slurm.reports.selection import RunFilter


def main(args: argparse.Namespace) -> int:
    """Archive runs, or undo this, and return the exit status. Raises UserError for invalid arguments."""
    criteria = RunFilter.from_arguments(args)
    if criteria == RunFilter():
        raise UserError('RUNS is missing; select the runs to archive with RUNS="<id> <id>", NAME, LAST, WHERE or SWEEP')
    is_undone = parse_zero_or_one("UNDO", args.undo)
    folders = selection.select_runs(criteria, Path(args.runs_folder or "runs"), newest=0)
    for folder in folders:
        description.set_archived(folder, not is_undone)
        print(folder.path.name)
    count = format_count(len(folders), "run")
    if is_undone:
        print(f"restored {count}")
    else:
        print(f"archived {count}; to list them: make status ALL=1; to restore them, repeat this command with UNDO=1")
    return 0
