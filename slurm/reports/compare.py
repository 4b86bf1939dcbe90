"""The `compare` command: compare runs in a terminal table and on an HTML page. This module does not import torch.

The HTML page is a single file that opens from disk without a network connection.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from itertools import chain
from pathlib import Path

from common.runs.compare import compare_page as pages
from common.runs.compare import setting_labels
from common.runs.compare.compare_table import Column, choose_columns, get_terminal_width, join_columns
from common.system.errors import UserError
from slurm.arguments import parse_zero_or_one
from slurm.reports import selection
from slurm.reports.compare_columns import (
    format_column_head,
    list_nonempty_columns,
    make_cell,
    sort_groups,
)
from slurm.reports.compare_content import make_compared_run, write_page
from slurm.reports.compared_runs import (
    SEED,
    RunGroup,
    count_label_settings,
    group_by_experiment,
    list_shown_settings,
    read_groups,
)
from slurm.reports.selection import RunFilter
from slurm.reports.status import FINAL_STATES

RELOAD_SECONDS = 5.0  # interval in which FOLLOW=1 writes the page, and in which the page reloads itself


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Which runs are compared, in which order, and where the page is written."""

    root: Path
    criteria: RunFilter
    page: Path
    sort_key: str
    """Name of the column by which the runs are sorted, or an empty string."""
    by_seed: bool
    """Whether runs that differ only in their seed share a row and a curve."""

    def read(self) -> list[RunGroup]:
        """Select, read and sort the runs. Raises UserError for invalid criteria."""
        groups = read_groups(selection.select_runs(self.criteria, self.root), self.by_seed)
        return sort_groups(groups, self.sort_key) if self.sort_key else groups

    def write_page(self, groups: list[RunGroup], reload_seconds: float = 0) -> None:
        """Write the page. With `reload_seconds`, the page reloads itself in this interval. Raises UserError."""
        shown = list_shown_settings(groups)
        label_count = count_label_settings(groups)
        differing = setting_labels.list_differing_settings([group.settings for group in groups])
        between_experiments = [key for key in differing if key not in (*shown, SEED)]
        columns = list_nonempty_columns(groups)
        runs = [make_compared_run(group, columns, self.page.parent) for group in groups]
        write_page(
            self.page,
            pages.render_page(runs, shown[:label_count], shown[label_count:], between_experiments, reload_seconds),
        )


def format_run_table(groups: list[RunGroup], width: int) -> str:
    """Return the table as text, with one row per run or group of runs, ordered by experiment.

    A line about each incomplete run follows the table. If the columns do not fit into `width` characters, the table
    contains short run ids. The names of columns that still do not fit are listed below the table.
    """
    experiments = group_by_experiment(groups)
    groups = list(chain(*experiments.values()))
    settings = []
    for key in list_shown_settings(groups):  # settings in labels come first
        settings.append(
            Column(setting_labels.format_setting_head(key), [group.format_setting(key) for group in groups])
        )
    label_count = count_label_settings(groups)

    # Earlier columns take precedence if the terminal is narrow. Settings in labels precede the results of the runs.
    columns = [Column("state", [group.state for group in groups], is_left_aligned=True)]
    columns += settings[:label_count]
    for name in list_nonempty_columns(groups):
        texts = [make_cell(name, group.list_values(name)).text for group in groups]
        columns.append(Column(format_column_head(name), texts))
    columns += settings[label_count:]

    # Use the full run ids if all columns fit next to them, and short ids otherwise.
    visible: list[Column] = []
    for ids in ([group.long_id for group in groups], [group.short_id for group in groups]):
        visible = choose_columns([Column("run", ids, is_left_aligned=True), *columns], width)
        if len(visible) > len(columns):
            break

    head, *body = join_columns(visible)
    lines = [head]
    for experiment, members in experiments.items():
        lines.append(f"{experiment}:")
        lines += [body.pop(0) for _ in members]

    hidden = [column.title for column in columns if column not in visible]
    if hidden:
        lines.append(f"columns not shown because the terminal is too narrow: {', '.join(hidden)}")
    for run in chain(*(group.runs for group in groups)):
        if run.is_incomplete:
            lines.append(f"{run.status.run} {run.status.state}: {run.status.detail}".removesuffix(": "))
    return "\n".join(lines)


def hide_measurement_curves(groups: list[RunGroup]) -> list[str]:
    """Remove the curves of measurement-only runs if other runs train a model.

    Each curve of a measurement-only run adds a chart and a column to the page. A training run has no values for these
    charts and columns. Returns the names of the experiments whose curves were removed.
    """
    runs = list(chain(*(group.runs for group in groups)))
    measuring = [run for run in runs if not selection.trains_model(run.folder.experiment, run.settings)]
    if len(measuring) == len(runs):
        return []
    for run in measuring:
        run.hide_curves()
    return sorted({run.folder.experiment for run in measuring})


def print_json(groups: list[RunGroup]) -> None:
    """Print the values of each run and the settings that differ as JSON."""
    differing = setting_labels.list_differing_settings([group.settings for group in groups])
    rows = []
    for group in groups:
        settings = {key: group.settings.get(key) for key in differing}
        rows.append(group.runs[0].table_row | {"label": group.label, "settings": settings})
    print(json.dumps({"differing": differing, "runs": rows}, indent=2))


def follow_runs(comparison: Comparison) -> int:
    """Update the page until no compared run is active or the user presses Ctrl-C.

    Returns 0, or 130 after Ctrl-C. The last page does not reload itself.
    """
    groups: list[RunGroup] = []
    try:
        while True:
            start = time.monotonic()
            groups = comparison.read()
            hide_measurement_curves(groups)
            states = [run.status.state for group in groups for run in group.runs]
            is_active = any(state not in FINAL_STATES for state in states)
            comparison.write_page(groups, RELOAD_SECONDS if is_active else 0)
            if not is_active:
                return 0
            # Long runs take long to read. Reading takes at most half of the time.
            time.sleep(max(RELOAD_SECONDS, time.monotonic() - start))
    except KeyboardInterrupt:
        print("\nno longer updating the page; the runs continue")
        if groups:
            comparison.write_page(groups)
        return 128 + signal.SIGINT


def format_link(path: Path) -> str:
    """Return the URL of a file, as a clickable link if stdout is a terminal."""
    address = path.absolute().as_uri()
    # Terminals display the escape sequence OSC 8 as a link.
    return f"\033]8;;{address}\033\\{address}\033]8;;\033\\" if sys.stdout.isatty() else address


def parse_group(text: str) -> bool:
    """Return whether runs are grouped by their seed. Raises UserError for any other group."""
    if text not in ("", SEED):
        raise UserError(f"GROUP must be {SEED} (got {text!r}); it combines the runs that differ only in their seed")
    return text == SEED


def main(args: argparse.Namespace) -> int:
    """Compare runs in a table and on an HTML page, and return the exit status.

    With JSON=1, the comparison is printed as JSON, and no page is written. Raises UserError for invalid arguments.
    """
    as_json = parse_zero_or_one("JSON", args.json)
    follows = parse_zero_or_one("FOLLOW", args.follow)
    by_seed = parse_group(args.group)
    for name, is_set in (("PAGE", args.page), ("FOLLOW", follows), ("GROUP", by_seed)):
        if as_json and is_set:
            raise UserError(f"{name} cannot be combined with JSON=1, which writes no page; omit one of them")
    root = Path(args.runs_folder or "runs")
    criteria = RunFilter.from_arguments(args)
    comparison = Comparison(root, criteria, Path(args.page or root / "compare.html"), args.sort, by_seed)
    groups = comparison.read()
    if as_json:
        print_json(groups)
        return 0
    print(format_run_table(groups, get_terminal_width()), flush=True)

    for name in hide_measurement_curves(groups):
        reason = "because other runs train a model"
        print(f"the page omits the measurements of {name} {reason}; to show them: make compare NAME={name}")
    comparison.write_page(groups)
    print(f"page: {format_link(comparison.page)}", flush=True)
    if not follows:
        return 0
    print(f"the page is updated every {RELOAD_SECONDS:.0f} s until all runs have ended; to stop: Ctrl-C", flush=True)
    status = follow_runs(comparison)
    if status == 0:
        print(format_run_table(comparison.read(), get_terminal_width()))
    return status
