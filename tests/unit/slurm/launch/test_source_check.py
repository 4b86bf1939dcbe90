"""Before anything starts with a run's copy of the source code, damaged and missing files are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError
from slurm.__main__ import main
from slurm.launch.source_check import check_source
from tests.harness.runs.synthetic_runs import SyntheticRun

DAMAGED_FILE = "common/config/config.py"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run_folder = SyntheticRun("mnist_pipeline", 0, 20).write(tmp_path)
    provenance.copy_source(run_folder)
    check_source(run_folder)
    return run_folder


@pytest.mark.slow
@pytest.mark.parametrize("command", ["exp --resume={}", "rerun -- {}"])
@pytest.mark.parametrize("has_checksums", [True, False], ids=["checksums", "an older run"])
def test_a_truncated_source_file_is_named(command: str, has_checksums: bool, folder: RunFolder) -> None:
    code = folder.path / "code"
    if not has_checksums:
        (code / provenance.CHECKSUMS).unlink()
    file = code / DAMAGED_FILE
    text = file.read_text()
    first_function = text.index("def ")
    os.truncate(file, text.index('"""', first_function))
    with pytest.raises(UserError) as caught:
        main([argument.format(folder.path) for argument in command.split()])
    problem = f"the run's copy of the source code is damaged: {DAMAGED_FILE} in {code}"
    assert f"{problem}; restore the files or start a new run" in str(caught.value)


def test_a_missing_source_file_is_named_unless_checksums_were_deleted_on_purpose(folder: RunFolder) -> None:
    code = folder.path / "code"
    (code / DAMAGED_FILE).unlink()
    with pytest.raises(UserError, match=f"{DAMAGED_FILE} in .* intentional, delete .*{provenance.CHECKSUMS}"):
        check_source(folder)
    (code / provenance.CHECKSUMS).unlink()
    check_source(folder)
