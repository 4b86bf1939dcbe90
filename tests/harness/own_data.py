"""The data set of one's own that CONTRIBUTING.md shows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.warm import ROOT


def write_example(folder: Path) -> Path:
    """Write the page's file into a folder."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (folder / "shapes.py").write_text(text)
    return folder / "shapes.py"
