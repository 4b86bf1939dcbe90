"""A folder of images that is larger than the memory that its preparation may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.shared import Data
from tests.harness.commands.programs import run_program


def make_small_folder(root: Path) -> Path:
    """Create a folder of 16 images."""
    small_folder = root / "few"
    for part in ("train", "val"):
        for label in ("noise", "more"):
            label_folder = small_folder / part / label
            label_folder.mkdir(parents=True)
            for number in range(4):
                (label_folder / f"{number}.jpg").hardlink_to(root / "noise.jpg")
    return small_folder


@pytest.mark.drawn
def test_an_image_folder_need_not_fit_into_memory(many: Data) -> None:
    small_folder = make_small_folder(Path(many.root))
    program = f"""
import dataclasses, os, resource
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # some images a core are decoded ahead
from common.data import prepare
from configs.shared import Data
def peak(whose): return resource.getrusage(whose).ru_maxrss * 1024
settings = {many!r}
prepare.prepare_dataset(dataclasses.replace(settings, root={str(small_folder)!r}, image_size=8))
before = peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN)
prepare.prepare_dataset(settings)
print(peak(resource.RUSAGE_SELF) - before[0], peak(resource.RUSAGE_CHILDREN) - before[1])
"""
    process_bytes, child_bytes = (int(number) for number in run_program(program).split())
    assert process_bytes < 20e6
    assert child_bytes < 80e6
