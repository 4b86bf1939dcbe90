"""An attempt on a rank that receives it from rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.system.errors import UserError
from common.training.attempt import Attempt
from common.training.run import Run


def test_a_host_without_the_run_folder_is_refused(run: Run, tmp_path: Path) -> None:
    content = Attempt(run.folder, run.prepared, is_new=True).to_content()
    assert Attempt.from_content(content).folder.path == run.folder.path

    hidden_folder = RunFolder(tmp_path / "hidden", run.folder.number)
    content["folder"] = str(hidden_folder.path)
    with pytest.raises(UserError, match=r"cannot see the run folder .*hidden.*mount a shared disk"):
        Attempt.from_content(content)
