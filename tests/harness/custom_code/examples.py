"""Write files with custom code: the examples of configs/README.md, recordings, and a pipeline schedule."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tests.harness.repository import ROOT

EXAMPLE_FILES = (
    "residual.py",
    "focal.py",
    "shapes.py",
    "waves.py",
    "recordings.py",
    "use_model.py",
    "lion.py",
    "halving.py",
)


def write_example(folder: Path, name: str = "shapes.py") -> Path:
    """Write one of the examples of configs/README.md into a folder."""
    page = (ROOT / "configs/README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    texts = dict(zip(EXAMPLE_FILES, blocks, strict=True))
    file = folder / name
    file.write_text(texts[name])
    return file


def write_recordings(folder: Path, count: int) -> Path:
    """Write `count` training files and `count` test files of two classes, for the example recordings.py."""
    draw = np.random.default_rng(0)
    for number in range(2 * count):
        part = "train" if number < count else "test"
        label = number % 2
        file = folder / part / ("high" if label else "low") / f"{number:04}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, draw.normal(label, 1, 64).astype(np.float32))
    return folder


def write_schedule(folder: Path, kinds: str = "FB") -> Path:
    """Write a file whose function `own` is GPipe's schedule with one stage per rank. Other `kinds` make it invalid."""
    (folder / "own.py").write_text(f"""def own(ranks, stages, microbatches):
    return [[(kind, rank, m) for kind in {kinds!r} for m in range(microbatches)] for rank in range(ranks)]
""")
    return folder / "own.py"
