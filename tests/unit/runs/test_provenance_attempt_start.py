"""The record of a start in meta.json, by which other commands find the process."""

from __future__ import annotations

import json
import os
from pathlib import Path

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.processes import Process


def test_the_record_of_a_start_identifies_its_process(tmp_path: Path) -> None:
    provenance.record_attempt_start(RunFolder(tmp_path, 1))
    (start,) = json.loads((tmp_path / "meta.json").read_text())["history"]
    assert Process(start["pid"], start["pid_started"]) == Process.identify(os.getpid())
