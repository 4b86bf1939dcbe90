"""The result of a run."""

from __future__ import annotations

from pathlib import Path

from common.runs.folder import RunFolder
from common.runs.result import Result


def test_an_existing_result_is_not_overwritten(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "mnist_pipeline", "")
    assert Result("finished", 0).write_once(folder)
    assert not Result("cancelled", 130).write_once(folder)
    assert folder.result["state"] == "finished"
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "result.json"]
