"""Custom code for tests: the data set, optimizer and decay that configs/README.md shows, and a schedule."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.warm import ROOT

EXAMPLES = ("shapes.py", "lion.py", "halving.py")


def write_example(folder: Path, name: str = "shapes.py") -> Path:
    """Write one of the page's files into a folder."""
    texts = re.findall(r"^```python\n(.*?)^```", (ROOT / "configs/README.md").read_text(), re.DOTALL | re.MULTILINE)
    (folder / name).write_text(dict(zip(EXAMPLES, texts, strict=True))[name])
    return folder / name


def write_schedule(folder: Path, kinds: str = "FB") -> Path:
    """Write a file whose function `own` is GPipe's schedule for one stage a rank; other kinds cannot work."""
    (folder / "own.py").write_text(f"""def own(ranks, stages, microbatches):
    return [[(kind, rank, m) for kind in {kinds!r} for m in range(microbatches)] for rank in range(ranks)]
""")
    return folder / "own.py"
