"""Write files with custom code: the examples of configs/README.md, and a pipeline schedule."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.repository import ROOT

EXAMPLE_FILES = ("shapes.py", "lion.py", "halving.py")


def write_example(folder: Path, name: str = "shapes.py") -> Path:
    """Write one of the examples of configs/README.md into a folder."""
    page = (ROOT / "configs/README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    texts = dict(zip(EXAMPLE_FILES, blocks, strict=True))
    file = folder / name
    file.write_text(texts[name])
    return file


def write_schedule(folder: Path, kinds: str = "FB") -> Path:
    """Write a file whose function `own` is GPipe's schedule with one stage per rank. Other `kinds` make it invalid."""
    (folder / "own.py").write_text(f"""def own(ranks, stages, microbatches):
    return [[(kind, rank, m) for kind in {kinds!r} for m in range(microbatches)] for rank in range(ranks)]
""")
    return folder / "own.py"
