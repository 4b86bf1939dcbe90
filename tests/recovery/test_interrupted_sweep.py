"""A sweep on this machine that Ctrl-C ends goes on: points that ran where they were saved, others from the start."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import yaml

from common.runs.folder import RunFolder, read_json
from tests.harness import warm
from tests.harness.processes import environment

SETTINGS = {
    "width": "8", "batch": "64", "steps": "300", "epochs": "5", "log.progress": "none", "data.name": "digits",
    "data.test_limit": "50", "launch.threads": "1",
}  # fmt: skip


def test_a_sweep_that_is_interrupted_goes_on(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "seeds.yaml"
    runs = tmp_path / "runs"
    settings = SETTINGS | {"data.cache": str(cache), "runs": str(runs)}
    tree = {"experiment": "mnist_pipeline", "grid": {"seed": ["1", "2"]}, "settings": settings}
    file.write_text(yaml.safe_dump(tree))
    argv = [sys.executable, "-m", "slurm", "sweep", "--launch=local", "--", str(file)]
    sweep = warm.Command(argv, env=environment(), session=True)
    deadline = time.monotonic() + 120
    while not list(runs.glob("mnist_pipeline-*/attempts/0001/metrics.jsonl")):
        assert time.monotonic() < deadline
        assert sweep.poll() is None
        time.sleep(0.1)
    os.killpg(sweep.pid, signal.SIGINT)
    assert sweep.wait(120) == 130, sweep.err
    (cell,) = read_json(runs / "sweeps" / "seeds" / "sweep.json")["cells"]
    assert cell["state"] in ("cancelled", "finished")
    completed = warm.execute(argv, env=environment(), timeout=250)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    cells = read_json(runs / "sweeps" / "seeds" / "sweep.json")["cells"]
    assert cells[0]["run"] == cell["run"]
    assert [one["state"] for one in cells] == ["finished"] * 2
    for one in cells:
        rows = [row for row in RunFolder(runs / one["run"]).read_metrics() if "loss" in row]
        assert [row["global_step"] for row in rows] == list(range(1, 301))
