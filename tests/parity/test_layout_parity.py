"""How images and filters lie in memory changes nothing but rounding, in a ResNet-18 of full width."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes import run


def test_channels_last_changes_nothing_but_rounding(tmp_path: Path, cache: Path) -> None:
    images = ("data.name=generated", "data.samples=20", "data.image_size=12", f"data.cache={cache}")
    quick = (
        "batch=4",
        "accumulate=1",
        "precision=fp32",
        "dtype=float64",
        "steps=2",
        "data.test_limit=4",
        "processes_per_node=1",
        "launch.threads=1",
    )
    done = [
        run("amp_accum", *images, *quick, "model=resnet18", f"channels_last={word}", runs=tmp_path / word)
        for word in ("false", "true")
    ]
    assert all(each.status == 0 for each in done), done[1].err
    assert done[0].losses == pytest.approx(done[1].losses, abs=1e-9, rel=0)
