"""Local SGD in runs: numbers of exchanges and bytes, the state of each worker in checkpoints, invalid settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from common.checkpoint import storage
from common.config import config
from common.models import networks
from common.runs.folder import RunFolder
from common.system.errors import UserError
from configs.local_sgd import Config
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import FinishedRun, Settings
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.resuming import copy_as_interrupted, resume_run

STEPS = 30
EVERY = 8
START = 5
SEPARATE_MODELS = "the checkpoint contains separate parameters for 2 ranks, but this run has 1; resume with 2 ranks"
MLP = networks.build_network("mlp", (28, 28), 10)
MLP_BYTES = 4 * sum(parameter.numel() for parameter in MLP.parameters())


@pytest.fixture
def trained(quick: Settings, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run with checkpoints at exchanges and between them."""
    settings = ("model=mlp", f"every={EVERY}", f"start={START}", "momentum_of=averaged")
    return run_experiment_once(tmp_path_factory, "local", "local_sgd", *quick, *settings)


def test_exchanges_and_bytes_are_counted(trained: FinishedRun) -> None:
    """Steps 13, 21 and 29 end a round, and 30 the run; each exchange has parameters and momentum."""
    assert trained.result["exchanges"] == 4
    assert trained.result["bytes_sent"] == MLP_BYTES * (START + 2 * 4)
    assert "4 in 30 steps" in trained.stdout
    assert "after every 8 steps after 5 synchronous steps" in trained.stdout


def test_a_checkpoint_contains_the_parameters_of_each_worker_and_their_mean(trained: FinishedRun) -> None:
    checkpoints = storage.list_checkpoints(trained.folder.list_attempts()[0])
    exchange_steps = {*range(1, START + 1), *range(START, STEPS, EVERY), STEPS}
    saved_steps = {checkpoint.step for checkpoint in checkpoints}
    assert saved_steps & exchange_steps
    assert saved_steps - exchange_steps
    for checkpoint in checkpoints:
        first, second = (torch.load(checkpoint.path / f"rank-{rank}.pt", weights_only=True) for rank in range(2))
        first_parameters = first["local"]["worker"]["vectors"]["parameters"]
        second_parameters = second["local"]["worker"]["vectors"]["parameters"]
        are_equal = torch.equal(first_parameters, second_parameters)
        assert are_equal == (checkpoint.step in exchange_steps), checkpoint.step
        mean = torch.cat([tensor.flatten() for tensor in first["model"].values()])
        assert torch.allclose(mean, (first_parameters + second_parameters) / 2, atol=1e-7)
        assert not second["model"]


def test_a_resume_with_other_ranks_or_another_start_is_refused(trained: FinishedRun, tmp_path: Path) -> None:
    folder = copy_as_interrupted(trained.folder, 15, tmp_path)
    completed = resume_run(ENTRY_BY_NAME["local_sgd"], folder, "processes_per_node=1", status=2)
    assert SEPARATE_MODELS in completed.stderr
    for completed in (
        in_process_calls.call_verb("exp", f"--resume={folder.path}", "--launch=local", "--nodes=5", status=2),
        resume_run(ENTRY_BY_NAME["local_sgd"], folder, "launch.nodes=5", status=2),
    ):  # the message does not advise another batch, although five ranks cannot divide it
        assert SEPARATE_MODELS.replace("has 1", "has 5") in completed.stderr
    completed = resume_run(ENTRY_BY_NAME["local_sgd"], folder, "start=20", status=2)
    assert "start cannot change when a run is resumed: it was 5" in completed.stderr


def test_a_finished_run_stays_finished_if_it_cannot_be_extended(trained: FinishedRun, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(trained.folder.path, tmp_path / trained.folder.path.name)))
    attempts = len(folder.list_attempts())
    result = folder.result
    completed = resume_run(ENTRY_BY_NAME["local_sgd"], folder, "processes_per_node=1", f"steps={STEPS + 4}", status=2)
    assert SEPARATE_MODELS in completed.stderr

    newest = storage.list_resumable_checkpoints(folder)[0]
    file = newest.path / "rank-1.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    completed = resume_run(ENTRY_BY_NAME["local_sgd"], folder, f"steps={STEPS + 4}", status=2)
    assert f"its last step ({STEPS}) is invalid: rank-1.pt does not match its checksum; restore" in completed.stderr
    shutil.rmtree(newest.path)
    completed = resume_run(ENTRY_BY_NAME["local_sgd"], folder, f"steps={STEPS + 4}", status=2)
    assert f"its last step ({STEPS}) is missing; start a new run" in completed.stderr

    assert len(folder.list_attempts()) == attempts, "a refused attempt was opened"
    assert folder.result == result
    assert result["state"] == "finished"


INVALID_SETTINGS = {
    "every=0": "every=0: out of range",
    "every=41 steps=40": "every=41 exceeds the 40 local steps of the run; use at most",
    "every=8 delay=6 steps=4": "every=8 exceeds the 4 local steps of the run; use at most every=4 and delay=3",
    "every=20 start=21 steps=40": "every=20 exceeds the 19 local steps",
    "every=1 start=40 steps=40": "start=40 makes all 40 steps of the run synchronous; use start=39",
    "start=4 steps=4": "start=4 makes all 4 steps of the run synchronous; use start=0 every=4",
    "start=9 steps=4 delay=5": "use start=0 every=4 delay=3",
    "outer_lr=0": "outer_lr=0: out of range",
    "outer_lr=2.5": "outer_lr=2.5: out of range",
    "outer=nesterov outer_momentum=1": "outer_momentum=1: out of range",
    "outer_momentum=0.5": "outer_momentum=0.5 needs outer=nesterov; set outer=nesterov or use outer_momentum=0.9",
    "communication=topk topk=0": "topk=0: out of range",
    "communication=topk topk=1.5": "topk=1.5: out of range",
    "topk=0.1": "topk=0.1 needs communication=topk",
    "powersgd_rank=4": "powersgd_rank=4 needs communication=powersgd",
    "communication=powersgd powersgd_rank=0": "powersgd_rank=0: out of range",
    "communication=int8 dtype=float64": "communication=int8 needs dtype=float32; with float64, use none, topk or",
    "communication=bf16 dtype=float64": "communication=bf16 needs dtype=float32",
    "communication=zip": "allowed: none | bf16 | int8 | topk | powersgd",
    "delay=8": "delay=8 must be less than every=8",
    "delay=-1": "delay=-1: out of range",
    "delay=2 momentum_of=averaged": "use momentum_of=own or reset",
    "momentum_of=averaged optim.momentum=0": "momentum_of=averaged requires optim.momentum",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused(settings: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        config.load_config(Config, settings.split(), {})
