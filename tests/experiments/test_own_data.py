"""A run on a data set of one's own: trained, measured again, and resumed when the file is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.harness import inside
from tests.harness.own_data import write_example
from tests.harness.processes import run
from tests.harness.registry import REPLICATED
from tests.harness.resuming import resume


def test_a_run_learns_and_keeps_the_set_of_the_contributing_page(tmp_path: Path) -> None:
    file = write_example(tmp_path)
    words = (f"data.name={file}:load", f"data.cache={tmp_path / 'sets'}", "steps=60", "log.progress=none")
    done = run(REPLICATED.name, *words, *REPLICATED.smallest, runs=tmp_path / "runs")
    assert done.status == 0, done.err
    folder = done.folder
    assert done.result["data"] == f"{file}:load" and done.result["test_accuracy"] > 0.9
    facts = json.loads((folder.path / "model.json").read_text())
    assert (facts["classes"], facts["shape"], done.result["test_samples"]) == (3, [12, 12], 500)
    assert (folder.path / "code" / "own" / "data.py").read_text() == file.read_text()
    told = inside.run_verb("evaluate", "--", str(folder.path))
    assert told.returncode == 0 and "recorded by the run: " in told.stdout, told.stdout + told.stderr
    file.write_text("another file by now")
    shutil.rmtree(tmp_path / "sets")
    resumed = resume(REPLICATED, folder, "steps=70")
    assert resumed.returncode == 0 and "extending the run after step 60" in resumed.stdout, resumed.stderr
    assert "different data" not in resumed.stderr and len(folder.read_metrics()) == 72
    told = inside.run_verb("evaluate", f"--args=data.name={file}:load", "--", str(folder.path))
    assert told.returncode == 2 and f"{file}:1: SyntaxError" in told.stderr, "the file that is named, not the one kept"
