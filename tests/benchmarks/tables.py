"""The measured tables and numbers of the pages, written from tests/benchmarks/recorded/: `make tables`.

    python -m tests.benchmarks.tables FILE.json [PART ...]     publishes parts of a record first

A page holds markers, and what stands between them is generated:

    <!-- measured ddp_multinode/step -->                                    a table of what was recorded, and its origin
    <!-- measured amp_accum/gpu | Precisions on a GPU -->                   the same below this caption
    <!-- output mnist_pipeline/run -->                                      what a command printed
    <!-- value ddp_multinode/step | this script / Fabric | value -->        one number in a sentence
    <!-- figure ddp_multinode -->                                           a figure of what was recorded
    <!-- end -->

A table of more than twelve rows shows those with a goal first, and folds all but twelve. A value is found in any row.
A table with a caption is hidden until it is recorded. Any other part that has not been recorded is shown as such, with
its command. Rows and columns have the wording of `labels.yaml`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.config import ROOT
from common.runs.folder import write_atomic, write_json
from common.system.errors import UserError, exit_on_user_error
from common.system.text import format_count
from tests.benchmarks import figures, labels, records
from tests.benchmarks.measure import ENOUGH

MARKER = r"<!-- (measured|output|value|figure) ([^|\n]+?)(?: \| ([^|\n]+?)(?: \| ([^|\n]+?))?)? -->"
MARKED = re.compile(MARKER + r"(.*?)<!-- end -->", re.DOTALL)
ELSEWHERE = {  # parts that are measured by other commands than `make bench`
    "suites/times": "python -m tests.benchmarks.suites",
    "cluster/faults": "python -m tests.cluster.faults",
    "cluster/elastic_faults": "python -m tests.cluster.faults --elastic",
    "cluster/elastic": "python -m tests.cluster.elastic_times",
    "cluster/kills": "python -m tests.cluster.elastic_times --minutes=10",
}
METHOD = ROOT / "CONTRIBUTING.md"
METHOD_HEADING = "how-numbers-are-measured"
MAX_SHOWN_ROWS = 12  # of a measured table; a page folds the other rows below it
Parts = Mapping[str, Mapping[str, Any]]


def list_pages() -> list[Path]:
    """The pages of the project."""
    inside = [f"{folder}/README.md" for folder in ("common", "configs", "slurm")]
    beside = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *inside, "slurm/security.md")
    named = [ROOT / name for name in beside if (ROOT / name).exists()]
    patterns = ("common/*/**/README.md", "tests/*/README.md", "experiments/*.md")
    return [*named, *(page for pattern in patterns for page in sorted(ROOT.glob(pattern)))]


def fill_page(text: str, parts: Parts, page: Path) -> str:
    """Return the text of a page with everything between its markers regenerated.

    Raises ValueError for a value that is not recorded.
    """
    method = f"{os.path.relpath(METHOD, page.parent)}#{METHOD_HEADING}"

    def replace(found: re.Match[str]) -> str:
        kind, name, what_or_caption, column, _ = found.groups()
        head = found.group(0)[: found.group(0).index("-->") + 3]
        if kind == "value":
            return f"{head}{format_value(parts, name, what_or_caption, column)}<!-- end -->"
        if kind == "measured":
            content = format_measured(parts, name, method, what_or_caption or "")
        elif kind == "figure":
            content = format_figure(parts, name, os.path.relpath(figures.FOLDER, page.parent))
        else:
            content = format_output(parts, name)
        return f"{head}\n{content}\n<!-- end -->"

    return MARKED.sub(replace, text)


def format_missing(name: str) -> str:
    command = ELSEWHERE.get(name, f"make bench NAME={name}")
    return f"Not recorded yet; run `{command}` on a quiet machine."


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def fold_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of a few rows, below which the others are folded.

    A table of at most MAX_SHOWN_ROWS rows is shown as it is. In a longer table, the rows with a goal come first.
    """
    if len(rows) <= MAX_SHOWN_ROWS:
        return format_table(header, rows)
    ordered = list(rows)
    if header[-1] == records.GOAL:
        ordered.sort(key=lambda cells: not cells[-1])  # keeps the order of the rows with a goal, and of the others
    folded = ordered[MAX_SHOWN_ROWS:]
    summary = f"<summary>{len(folded)} more row{'s' * (len(folded) != 1)}</summary>"
    # GitHub renders a table inside <details> only between blank lines.
    details = ["<details>" + summary, format_table(header, folded), "</details>"]
    return "\n\n".join([format_table(header, ordered[:MAX_SHOWN_ROWS]), *details])


def format_measured(parts: Parts, name: str, method: str, caption: str = "") -> str:
    """Return the table of a part and its origin; with a caption, the caption before them or nothing at all."""
    if name not in parts:
        return "" if caption else format_missing(name)
    part = labels.reword_table(name, parts[name])
    header, *rows = records.lines_of(part)
    blocks = [f"\n{caption}:"] if caption else []
    blocks += [fold_table(header, rows), records.origin_of(part, labels.list_conditions(name, part), method)]
    return "\n\n".join(blocks)


def format_output(parts: Parts, name: str) -> str:
    """What a command printed."""
    return f"```text\n{parts[name]['output']}\n```" if name in parts else format_missing(name)


def format_figure(parts: Parts, name: str, folder: str) -> str:
    """A figure in `folder`, the path of the figures from the page; nothing before its part is recorded."""
    is_recorded = figures.collect_figures()[name][0] in parts
    return f"![{name.replace('_', ' ')}]({folder}/{name}.svg)" if is_recorded else ""


def format_value(parts: Parts, name: str, what: str, column: str) -> str:
    """One cell of a table; the head of the first column of numbers will do for a table of one."""
    if name not in parts:
        return "(not recorded yet)"
    table = labels.reword_table(name, parts[name])["table"]
    what = labels.reword(name, what)
    column = labels.reword(name, column)
    rows = [row for row in table["rows"] if row["what"] == what]
    if not rows or column not in table["columns"][1:]:
        raise ValueError(f"{name} has no row {what!r} or no column {column!r}")
    cell = rows[0]["cells"][table["columns"].index(column) - 1]
    return cell if isinstance(cell, str) else records.figure(cell["value"])


def publish(file: Path, names: Sequence[str], folder: Path = records.RECORDED) -> None:
    """Add the parts of a record with these names, all without names, to those that pages show.

    They replace those of the same day that other machines recorded, of which the date does not say which are newer.
    Raises UserError, and publishes nothing, if a part has no commit or fewer than ENOUGH undisturbed rounds.
    """
    content = json.loads(file.read_text())
    to = folder / file.name
    known = json.loads(to.read_text())["parts"] if to.exists() else {}
    chosen = {name: part for name, part in content["parts"].items() if not names or name in names}
    for name, part in chosen.items():
        require_commit(name, part)
        require_enough_rounds(name, part)
    write_json(to, content | {"parts": known | chosen})
    for other in set(folder.glob(f"{content['date']}-*.json")) - {to}:
        record = json.loads(other.read_text())
        kept = {name: part for name, part in record["parts"].items() if name not in chosen}
        write_json(other, record | {"parts": kept})


def require_commit(name: str, part: Mapping[str, Any]) -> None:
    """Raise UserError if a part does not name the commit of the measured code."""
    if not part.get("commit"):
        raise UserError(
            f"{name} was measured without a commit or with uncommitted changes; commit all changes, and repeat "
            f"`{part['command']}`"
        )


def require_enough_rounds(name: str, part: Mapping[str, Any]) -> None:
    """Raise UserError if a part was measured in rounds, and too few of them were undisturbed."""
    count = records.count_undisturbed_rounds(part)
    if count is not None and count < ENOUGH:
        option = "more MINUTES" if "samples" in part else f"--rounds={ENOUGH}"
        raise UserError(
            f"{name} has {format_count(count, 'undisturbed round')}, but a published table needs {ENOUGH}; "
            f"repeat `{part['command']}` on a quiet machine, with {option}"
        )


def main(words: Sequence[str] = ()) -> None:
    if words:
        if not Path(words[0]).is_file():
            raise UserError(f"{words[0]}: no such file; name a record of tests/benchmarks/results/")
        publish(Path(words[0]), words[1:])
    parts = records.recorded()
    for page in list_pages():
        before = page.read_text()
        after = fill_page(before, parts, page)
        if after != before:
            write_atomic(page, after)
            print(page.relative_to(ROOT))
    for figure in figures.draw(parts):
        print(figure.relative_to(ROOT))


if __name__ == "__main__":
    with exit_on_user_error():
        main(sys.argv[1:])
