"""The source in a run's `code/`: a file that is torn or gone is named before anything is started with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError
from slurm.__main__ import main
from tests.harness.made_runs import Made

TORN = "common/config/config.py"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = Made("mnist_pipeline", 0, 20).write(tmp_path)
    provenance.copy_source(made)
    provenance.check_source(made)
    return made


@pytest.mark.parametrize("verb", ["exp --resume={}", "rerun -- {}"])
@pytest.mark.parametrize("has_checksums", [True, False], ids=["checksums", "an older run"])
def test_a_torn_file_is_named(verb: str, has_checksums: bool, folder: RunFolder) -> None:
    code = folder.path / "code"
    if not has_checksums:
        (code / provenance.CHECKSUMS).unlink()
    text = (code / TORN).read_text()
    os.truncate(code / TORN, text.index('"""', text.index("def ")))
    with pytest.raises(UserError) as caught:
        main([word.format(folder.path) for word in verb.split()])
    problem = f"the run's copy of the source code is damaged: {TORN} in {code}; restore the files or start a new run"
    assert problem in str(caught.value)


def test_a_file_that_is_gone_is_named_and_changes_on_purpose_are_possible(folder: RunFolder) -> None:
    (folder.path / "code" / TORN).unlink()
    with pytest.raises(UserError, match=f"{TORN} in .* intentional, delete .*{provenance.CHECKSUMS}"):
        provenance.check_source(folder)
    (folder.path / "code" / provenance.CHECKSUMS).unlink()
    provenance.check_source(folder)
