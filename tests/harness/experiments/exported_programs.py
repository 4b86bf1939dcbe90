"""Execute exported programs in the process of the test."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def run_exported_program(path: Path, images: Tensor) -> Tensor:
    """Return the outputs, as `exporting.run_exported_program_in_new_process` does, but in this process."""
    with torch.no_grad():
        outputs: Tensor = torch.export.load(path).module()(images)
    return outputs
