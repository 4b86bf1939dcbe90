"""The verb `tour`: run every experiment briefly at a small scale, then compare the runs."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.config import config, config_keys
from common.config.command_line import parse_command_line
from slurm.arguments import reject_options
from slurm.reports import selection

FEW_STEPS = ("epochs=1", "steps=30", "data.test_limit=1000")


def list_tour_settings(name: str, words: Sequence[str]) -> list[str]:
    """Return the settings of an experiment in the tour, followed by those of the settings `words` that it has."""
    schema = config.import_schema(name)
    values = parse_command_line([*FEW_STEPS, *schema.smallest_settings, *words]).values
    values = config_keys.drop_training_keys(schema, values)
    return [f"{key}={text}" for key, text in values.items()]


def main(args: argparse.Namespace) -> int:
    """Run every experiment briefly at a small scale, compare the runs, and return the exit status."""
    reject_options(args.words)
    root = Path(parse_command_line(args.words).values.get("runs", "runs"))
    old_paths = {folder.path for folder in selection.list_all_runs(root)}
    start = time.monotonic()
    failed: list[str] = []
    for name in config.list_experiments():
        settings = shlex.join(list_tour_settings(name, args.words))
        print(f"\n---- {name}: make exp NAME={name} ARGS={shlex.quote(settings)}", flush=True)
        command = [sys.executable, "-m", "slurm", "exp", "--launch=local", f"--args={settings}", "--", name]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)

    print(f"\n---- comparison of all runs (after {time.monotonic() - start:.0f} s)", flush=True)
    new_paths = [str(folder.path) for folder in selection.list_all_runs(root) if folder.path not in old_paths]
    compare_status = 0
    if new_paths:
        runs = shlex.join(new_paths)
        command = [sys.executable, "-m", "slurm", "compare", f"--runs-folder={root}", f"--runs={runs}"]
        compare_status = subprocess.run(command, check=False).returncode
    if failed:
        print(f"error: {', '.join(failed)} failed; see the messages above", file=sys.stderr)
        return 1
    return compare_status
