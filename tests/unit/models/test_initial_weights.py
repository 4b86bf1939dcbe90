"""The setting `weights`."""

from __future__ import annotations

from pathlib import Path

from tests.harness.commands.processes import run_experiment


def test_missing_weights_are_refused_before_the_run_starts(tmp_path: Path) -> None:
    settings = ("weights=nowhere.pt", "data.name=generated", f"data.cache={tmp_path / 'sets'}")
    refused_run = run_experiment("ddp_multinode", *settings, runs=tmp_path / "runs", status=2)
    assert refused_run.stderr.startswith("error: weights=nowhere.pt: no such file, checkpoint folder or run")
    assert not list(tmp_path.iterdir())
