"""Collect the content of the comparison page, and write the page. This module does not import torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from common.runs.compare import compare_page as pages
from common.runs.compare.compare_page import ComparedRun, LoggedImage
from common.runs.folder import RunFolder, convert_disk_errors, read_json, write_atomic
from common.runs.metrics_rows import parse_json
from common.system.errors import UserError
from common.system.text import read_text_or_empty
from slurm.reports.compare_columns import COLUMN_FORMATS, format_column_head, make_cell
from slurm.reports.compared_runs import RunGroup
from slurm.reports.logs import find_rank_0_log

MAX_LOG_LINKS = 4  # maximum number of ranks whose logs the page links individually
MAX_IMAGES = 8  # maximum number of images of a run with the same name that the page shows


def make_compared_run(group: RunGroup, names: list[str], page_folder: Path) -> ComparedRun:
    """Build the data that the HTML page shows for a run, or for runs that differ only in their seed.

    `names` contains the names of the table columns. Links to files are relative to `page_folder`.
    """
    cells = {format_column_head(name): make_cell(name, group.list_values(name)) for name in names}
    # Every metric without a column in the terminal table gets an additional column on the page.
    for name in group.list_metrics():
        if name not in COLUMN_FORMATS:
            cells[format_column_head(name)] = make_cell(name, group.list_metric_values(name))
    links: dict[str, str] = {}
    images: list[LoggedImage] = []
    details = []
    for run in group.runs:
        title = f"{run.short_id}: " if len(group.runs) > 1 else ""
        run_links = collect_run_links(run.folder, page_folder)
        links |= {title + text: address for text, address in run_links.items()}
        images += read_images(run.folder, page_folder)
        if run.is_incomplete and run.status.detail:
            details.append(title + run.status.detail)
    key = " ".join(run.status.run for run in group.runs)
    return ComparedRun(
        key,
        group.experiment,
        group.short_id,
        group.label,
        group.state,
        group.curves,
        cells,
        group.settings,
        "; ".join(details),
        links,
        images,
        len(group.runs),
        group.end_symbol,
    )


def make_relative_url(path: Path, page_folder: Path) -> str:
    """Return the URL of a file, relative to the folder of the page."""
    return quote(os.path.relpath(path, page_folder.absolute()))


def read_images(folder: RunFolder, page_folder: Path) -> list[LoggedImage]:
    """Return the images that a run has logged, oldest first. Links to files are relative to `page_folder`.

    If a run has logged more than MAX_IMAGES images with the same name, only the newest ones are returned. Images of
    steps that a later attempt repeated, and images whose files are missing, are omitted.
    """
    images: dict[str, list[LoggedImage]] = {}
    for part in folder.list_attempt_parts():
        attempt = part.attempt.attempt_folder
        for line in read_text_or_empty(str(attempt / "media.jsonl")).splitlines():
            entry = parse_json(line)
            if not isinstance(entry, dict) or entry.get("kind") != "image":
                continue
            step = entry.get("global_step")
            file = attempt / "media" / Path(str(entry.get("file"))).name
            if isinstance(step, int) and part.includes_step(step) and file.is_file():
                address = make_relative_url(file, page_folder)
                image = LoggedImage(str(entry.get("name")), step, address)
                images.setdefault(image.name, []).append(image)
    return [image for series in images.values() for image in series[-MAX_IMAGES:]]


def collect_run_links(folder: RunFolder, page_folder: Path) -> dict[str, str]:
    """Return links to the files of a run and to its W&B run, by title.

    Links to files are relative to `page_folder`. Files that do not exist are omitted.
    """
    names = {"settings": "config.yaml", "resolved settings": "resolved.yaml", "result": "result.json"}
    files = {"folder": folder.path} | {title: folder.path / name for title, name in names.items()}
    for attempt in folder.list_attempts()[-1:]:
        logs = sorted(attempt.attempt_folder.glob("logs/rank-*.log"), key=lambda path: int(path.stem.split("-")[1]))
        for log in logs[:MAX_LOG_LINKS]:
            files[f"log {log.stem.rpartition('-')[2]}"] = log
        if len(logs) > MAX_LOG_LINKS:
            files["all logs"] = attempt.attempt_folder / "logs"
        if (folder.path / "submit").exists():
            files["job"] = find_rank_0_log(folder)

    links = {title: make_relative_url(path, page_folder) for title, path in files.items() if path.exists()}
    address = str(read_json(folder.path / "wandb" / "status.json").get("url"))
    if address.startswith("https://"):
        links["W&B"] = address
    return links


def write_page(page: Path, text: str) -> None:
    """Write the HTML page to a file.

    Raises UserError if writing fails, or if the file exists and was not written by `make compare`.
    """
    try:
        if not page.parent.exists():
            raise UserError(f"PAGE={page}: the folder {page.parent} does not exist; create it or choose another file")
        if page.exists() and not is_compare_page(page):
            raise UserError(f"{page} exists but was not written by make compare; delete it or choose another PAGE")
        with convert_disk_errors(page):
            write_atomic(page, text)
    except OSError as error:
        reason = "part of the path is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot write PAGE={page} ({reason}); use another file, such as runs/compare.html") from None


def is_compare_page(path: Path) -> bool:
    """Return whether `make compare` wrote a file.

    Pages from older versions do not contain the tag `pages.MARK` and are recognized by their title.
    """
    with open(path, "rb") as file:
        beginning = file.read(1000).decode(errors="replace")
    return pages.MARK in beginning or bool(re.search(r"<title>\d+ runs compared</title>", beginning))
