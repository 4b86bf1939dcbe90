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
from tests.harness.declared import import_of_experiments

FOLDER = ROOT / "experiments" / "figures"
PLANNED = ("naive", "gpipe", "1f1b")
MARGIN = 120  # pixels of a window that chromium may take for itself: what lies below is not drawn in full
Parts = Mapping[str, Mapping[str, Any]]


def collect_figures() -> dict[str, Figure]:
    """Return the figures that the benchmarks of the experiments declare, by the file's name."""
    figures: dict[str, Figure] = {}
    for module in import_of_experiments("tests.benchmarks.{}").values():
        figures |= getattr(module, "FIGURES", {})
    return figures


def draw(parts: Parts, folder: Path = FOLDER) -> list[Path]:
    """Draw every figure whose part is recorded."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same numbers give the same file
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "figures"
    folder.mkdir(exist_ok=True)
    drawn = []
    for name in PLANNED:
        drawn.append(folder / f"schedule_{name}.svg")
        draw_plan(drawn[-1], name)
    for name, (part, figure) in collect_figures().items():
        if part in parts:
            drawn.append(folder / f"{name}.svg")
            figure(drawn[-1], parts[part])
    return drawn


def photograph(page: Path, to: Path, width: int = 1200, height: int = 870) -> None:
    """A picture of a page as chromium shows it. Raises FileNotFoundError without chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("chromium is missing: apt-get install chromium")
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    with tempfile.TemporaryDirectory() as home:
        window = f"--window-size={width},{height + MARGIN}"
        command = [chromium, *words, window, f"--user-data-dir={home}"]
        subprocess.run(
            [*command, f"--screenshot={to}", page.resolve().as_uri()], check=True, capture_output=True, timeout=180
        )
    from PIL import Image

    # median cut, the default, gives thin coloured lines to grey
    picture = Image.open(to).convert("RGB").crop((0, 0, width, height))
    picture.quantize(64, Image.Quantize.MAXCOVERAGE).save(to, optimize=True)


if __name__ == "__main__":
    if sys.argv[1:2] != ["compare"] or len(sys.argv) != 3:
        sys.exit((__doc__ or "").strip())
    photograph(Path(sys.argv[2]), FOLDER / "compare.png")
