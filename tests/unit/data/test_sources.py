"""Sources of data sets: generated images, and the lock of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.data import sources
from common.system.errors import UserError


def test_generated_images_that_exceed_the_memory_are_refused() -> None:
    with pytest.raises(UserError, match=r"MB of memory are available; lower data\.samples or data\.image_size"):
        sources.generate_images(10_000_000, 1024, 10, 0)


def test_a_file_in_place_of_the_cache_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.touch()
    with pytest.raises(UserError, match="cache is a file; choose another folder"), sources.hold_folder_lock(file):
        pass
