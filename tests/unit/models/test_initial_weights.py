"""The setting `weights`."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.models.initial_weights import find_initial_weights
from common.system.errors import UserError
from tests.harness.commands.processes import run_experiment


def test_missing_weights_are_refused_before_the_run_starts(tmp_path: Path) -> None:
    settings = ("weights=nowhere.pt", "data.name=generated", f"data.cache={tmp_path / 'sets'}")
    refused_run = run_experiment("ddp_multinode", *settings, runs=tmp_path / "runs", status=2)
    assert refused_run.stderr.startswith("error: weights=nowhere.pt: no such file, checkpoint folder or run")
    assert not list(tmp_path.iterdir())


def test_an_id_that_two_runs_end_with_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"ddp_multinode-20260101-00000{number}-4f1c").mkdir()
    with pytest.raises(UserError, match=r"weights=4f1c is ambiguous: the ids .*0-4f1c and .*1-4f1c end with 4f1c"):
        find_initial_weights("4f1c", tmp_path)
    file = tmp_path / "files" / "4f1c"
    file.parent.mkdir()
    file.touch()
    assert find_initial_weights(str(file), tmp_path) == file
