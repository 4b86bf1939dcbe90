"""The data set of one's own that CONTRIBUTING.md shows, and a schedule of one's own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.warm import ROOT


def write_example(folder: Path) -> Path:
    """Write the page's file into a folder."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (folder / "shapes.py").write_text(text)
    return folder / "shapes.py"


def write_schedule(folder: Path, kinds: str = "FB") -> Path:
    """Write a file whose function `own` is GPipe's schedule for one stage a rank; other kinds cannot work."""
    (folder / "own.py").write_text(f"""def own(ranks, stages, microbatches):
    return [[(kind, rank, m) for kind in {kinds!r} for m in range(microbatches)] for rank in range(ranks)]
""")
    return folder / "own.py"
