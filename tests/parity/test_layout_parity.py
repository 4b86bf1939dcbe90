"""The memory format of images and filters changes only rounding, in a ResNet-18 of full width."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import run_experiment


@pytest.mark.drawn
def test_channels_last_changes_only_rounding(tmp_path: Path, cache: Path) -> None:
    images = ("data.name=generated", "data.samples=20", "data.image_size=12", f"data.cache={cache}")
    training = ("batch=4", "accumulate=1", "precision=fp32", "dtype=float64", "steps=2", "model=resnet18")
    size = ("data.test_limit=4", "processes_per_node=1", "launch.threads=1")
    settings = (*images, *training, *size)
    contiguous = run_experiment("amp_accum", *settings, "channels_last=false", runs=tmp_path / "false")
    assert contiguous.returncode == 0, contiguous.stderr
    channels_last = run_experiment("amp_accum", *settings, "channels_last=true", runs=tmp_path / "true")
    assert channels_last.returncode == 0, channels_last.stderr
    assert contiguous.losses == pytest.approx(channels_last.losses, abs=1e-9, rel=0)
