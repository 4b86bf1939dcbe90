"""Strategies side by side: each legal strategy is one run, and a table and a figure compare the runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from common.system.exit_status import EXIT_REFUSED
from tests.harness.commands import execution
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import make_environment

BIGRAM_MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.vectors = nn.Embedding(outputs, 16)
        self.head = nn.Linear(16, outputs)

    def forward(self, tokens):
        return self.head(self.vectors(tokens).relu())
"""
SETTINGS = (
    "data.context=16 batch=16 steps=6 optim.warmup=0 data.test_limit=8 eval_batch=8 log.progress=none launch.threads=1"
)


def compare_strategies(folder: Path, cache: Path, status: int = 0) -> Completed:
    """Execute `make sweep` for all strategies of two ranks that a custom network has."""
    settings = f"model={folder}/net.py:Net runs={folder}/runs data.cache={cache} {SETTINGS}"
    argv = [sys.executable, "-m", "slurm", "sweep", "--launch=local", "--name=gpt_parallel", "--ranks=2"]
    argv += [f"--args={settings}", "--", "configs/sweeps/strategies.py"]
    return execution.execute_command(argv, env=make_environment(), timeout=200, status=status)


@pytest.mark.drawn
@pytest.mark.slow
def test_a_custom_network_is_compared_in_every_legal_strategy(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "net.py").write_text(BIGRAM_MODEL.replace("outputs, 16", "missing, 16"))
    completed = compare_strategies(tmp_path, cache, status=EXIT_REFUSED)
    assert "NameError: name 'missing' is not defined" in completed.stderr
    assert not list((tmp_path / "runs" / "sweeps").iterdir()), "the corrected network starts a new sweep"

    (tmp_path / "net.py").write_text(BIGRAM_MODEL)
    out = compare_strategies(tmp_path, cache).stdout
    assert "5 points of gpt_parallel (5 missing); 5 to run now" in out
    assert "not available: stages=2 schedule=1f1b and 14 more: tensor, context, fsdp and stages" in out
    assert "not available: one process recompute=blocks and 1 more: recompute=blocks: the network Net has no blo" in out
    assert out.count("REFUSED") == 2
    assert "4 runs not started yet; estimated time: " in out
    assert f"settings of all runs: model={tmp_path}/net.py:Net batch=16 steps=6 layers=8" in out
    for number, label in enumerate(("one process", "replicas=2", "replicas=2 zero1=true"), 1):
        (row,) = re.findall(rf"^{number}  {label} .*$", out, re.MULTILINE)
        *_, memory, memory_deviation, _, sent, sent_deviation, _, difference = row.split()
        assert memory_deviation == sent_deviation == "-", "a custom network has no formulas"
        assert float(memory) > 0
        assert (float(sent) > 0) == (number > 1)
        assert float(difference) < 1e-5
    assert "4 steps after the warm-up, in 1 round" in out, "five of six steps are timed, and one of them is skipped"
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert "replicas=2" in (folder / "strategies.svg").read_text()
    cells = json.loads((folder / "sweep.json").read_text())["cells"]
    assert [cell["state"] for cell in cells].count("finished") == 3

    repeated = compare_strategies(tmp_path, cache).stdout
    assert "(3 finished, 2 refused); 0 to run now" in repeated
    table = out[out.index("#") : out.index("step time:")]
    assert table in repeated
