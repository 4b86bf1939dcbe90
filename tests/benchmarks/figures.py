"""The figures of the pages: schedules as they are planned, and steps and comparisons as they were recorded.

make tables                                             draws experiments/figures/*.svg with the tables
python -m tests.benchmarks.figures compare RUN_PAGE     a picture of a page of make compare, by headless chromium
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.config import ROOT
from tests.benchmarks.drawing import Figure, draw_plan
from tests.harness.experiments.discovery import import_experiment_modules

FOLDER = ROOT / "experiments" / "figures"
PLANNED = ("naive", "gpipe", "1f1b")
MARGIN = 120  # pixels of a window that chromium may take for itself: what lies below is not drawn in full
CHROMIUM_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
CHROMIUM_TIMEOUT = 180  # seconds
Parts = Mapping[str, Mapping[str, Any]]


def collect_figures() -> dict[str, Figure]:
    """Return the figures that the benchmarks of the experiments declare, by the file's name."""
    figures: dict[str, Figure] = {}
    for module in import_experiment_modules("tests.benchmarks.{}").values():
        figures |= getattr(module, "FIGURES", {})
    return figures


def draw(parts: Parts, folder: Path = FOLDER) -> list[Path]:
    """Draw every figure whose part is recorded, and return the files."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same numbers give the same file
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "figures"
    folder.mkdir(exist_ok=True)
    files = []
    for name in PLANNED:
        file = folder / f"schedule_{name}.svg"
        draw_plan(file, name)
        files.append(file)
    for name, (part, figure) in collect_figures().items():
        if part in parts:
            file = folder / f"{name}.svg"
            figure(file, parts[part])
            files.append(file)
    return files


def photograph(page: Path, to: Path, width: int = 1200, height: int = 1225) -> None:
    """Save a picture of a page as chromium shows it. Raises FileNotFoundError without chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as home:
        command = [chromium, *CHROMIUM_OPTIONS, "--virtual-time-budget=8000", f"--user-data-dir={home}"]
        command += [f"--window-size={width},{height + MARGIN}", f"--screenshot={to}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=CHROMIUM_TIMEOUT)
    from PIL import Image

    # median cut, the default, turns thin coloured lines grey
    picture = Image.open(to).convert("RGB").crop((0, 0, width, height))
    picture.quantize(64, Image.Quantize.MAXCOVERAGE).save(to, optimize=True)


if __name__ == "__main__":
    if sys.argv[1:2] != ["compare"] or len(sys.argv) != 3:
        sys.exit((__doc__ or "").strip())
    photograph(Path(sys.argv[2]), FOLDER / "compare.png")
