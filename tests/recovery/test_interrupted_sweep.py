"""A local sweep that Ctrl-C interrupted resumes: started points from their checkpoint, other points from step 0."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import yaml

from common.runs.folder import RunFolder, read_json
from tests.harness.commands import execution
from tests.harness.commands.processes import WAIT_TIMEOUT, make_environment

SETTINGS = {
    "width": "8", "batch": "64", "steps": "300", "epochs": "5", "log.progress": "none", "data.name": "digits",
    "data.test_limit": "50", "launch.threads": "1",
}  # fmt: skip


def test_an_interrupted_sweep_is_resumed(tmp_path: Path, cache: Path) -> None:
    sweep_file = tmp_path / "seeds.yaml"
    runs = tmp_path / "runs"
    record = runs / "sweeps" / "seeds" / "sweep.json"
    settings = SETTINGS | {"data.cache": str(cache), "runs": str(runs)}
    definition = {"experiment": "mnist_pipeline", "grid": {"seed": ["1", "2"]}, "settings": settings}
    sweep_file.write_text(yaml.safe_dump(definition))
    argv = [sys.executable, "-m", "slurm", "sweep", "--launch=local", "--", str(sweep_file)]
    with execution.start_command(argv, env=make_environment()) as sweep:
        deadline = time.monotonic() + 120
        while not list(runs.glob("mnist_pipeline-*/attempts/0001/metrics.jsonl")):
            assert time.monotonic() < deadline
            assert sweep.poll() is None
            time.sleep(0.1)
        os.killpg(sweep.pid, signal.SIGINT)
        assert sweep.wait(WAIT_TIMEOUT) == 130, sweep.stderr
    assert "stopping   1 run; a run that trains saves a checkpoint first" in sweep.stdout
    assert "the sweep was stopped; to continue it, repeat the command" in sweep.stdout
    (interrupted,) = read_json(record)["cells"]
    assert interrupted["state"] in ("cancelled", "finished")

    completed = execution.execute_command(argv, env=make_environment(), timeout=250, status=0)
    assert "estimated time" not in completed.stdout, "the time of a resumed run says nothing about the others"
    cells = read_json(record)["cells"]
    assert len(cells) == 2
    assert cells[0]["run"] == interrupted["run"]
    for cell in cells:
        assert cell["state"] == "finished"
        rows = RunFolder(runs / cell["run"]).read_metrics()
        steps = [row["global_step"] for row in rows if "loss" in row]
        assert steps == list(range(1, 301))
