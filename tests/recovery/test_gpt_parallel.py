"""A run of gpt_parallel with a layout equals one process, is resumed with another layout, and lends its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.checkpoint import storage
from common.models.model_file import read_model
from common.models.weights import load_model_of_newest_checkpoint
from common.runs.folder import RunFolder
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.environment.randomness import draw_cases
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.resuming import check_resume, copy_as_interrupted, resume_run
from tests.harness.settings_text import split_cases, split_settings

ENTRY = ENTRY_BY_NAME["gpt_parallel"]
VARIED_SETTINGS = """
    data.name=text data.context=16 width=16 layers=2 heads=2 dropout=0.2 masked=0.3
    accumulate=2 dtype=float64 steps=16 evaluate_every=5
"""
VARIED = split_settings(VARIED_SETTINGS)
LAYOUTS = ("tensor=2", "tensor=2 sequence=true", "context=2", "fsdp=2", "replicas=2", "stages=2 schedule=zero_bubble")
FOUR = "layers=4 accumulate=4"
LAYOUT_PAIRS = (
    ("replicas=1", "tensor=2 sequence=true"),
    ("tensor=2", "tensor=1 fsdp=2"),
    ("fsdp=2", "fsdp=1"),
    ("", "tensor=2"),
    ("fsdp=2 tensor=2 sequence=true", "replicas=1 fsdp=1 tensor=1 sequence=false"),
    ("tensor=2 sequence=true", "replicas=2 fsdp=2 tensor=1 sequence=false"),
    ("context=2", "context=1 tensor=2"),
    ("fsdp=2", "fsdp=2 context=2"),
    ("stages=2", "stages=1 tensor=2"),
    ("fsdp=2", "fsdp=1 stages=2"),
    (f"{FOUR} stages=2 schedule=gpipe", "schedule=zero_bubble"),
    (f"{FOUR} stages=2", "stages=4 stages_per_process=2 schedule=zbv"),
    (f"{FOUR} stages=4 stages_per_process=2 schedule=zbv", "schedule=interleaved_1f1b zero1=true replicas=2"),
    ("stages=2 fsdp=2", "schedule=naive replicas=2 zero1=true fsdp=1"),
    ("stages=2 replicas=2 zero1=true", "zero1=false replicas=1 fsdp=2 schedule=gpipe recompute=blocks"),
)

COMBINATIONS = """
    replicas=2 zero1=true recompute=selective
    context=2 recompute=blocks
    stages=4 stages_per_process=2 schedule=zbv
    stages=4 stages_per_process=2 schedule=dualpipev
    stages=2 schedule=tests/harness/custom_code/schedules.py:last_first
    recompute=blocks stages=2 schedule=naive
    recompute=selective stages=2 schedule=gpipe
    recompute=blocks stages=4 stages_per_process=2 schedule=interleaved_1f1b
    recompute=selective stages=2 replicas=2 zero1=true
    stages=2 replicas=2 schedule=zero_bubble
    stages=4 stages_per_process=2 replicas=2 schedule=dualpipev
    stages=4 stages_per_process=2 replicas=2 schedule=interleaved_1f1b
    stages=4 stages_per_process=2 tensor=2 schedule=interleaved_1f1b
    stages=4 stages_per_process=2 context=2 schedule=interleaved_1f1b
    stages=2 fsdp=2
    stages=2 fsdp=2 schedule=naive reshard=false
    stages=2 context=2 fsdp=2
"""
"""Settings of runs of four blocks and four microbatches, one run in each line."""


def read_losses(folder: RunFolder) -> list[float]:
    """Return the losses of all steps and evaluations."""
    losses = []
    for row in folder.read_metrics():
        test_loss = row.get("test_loss", 0.0)
        losses.append(row.get("loss", test_loss))
    return losses


@pytest.mark.parametrize("layout", draw_cases("gpt-commands", LAYOUTS, 1))
def test_a_command_with_a_layout_equals_a_single_process(layout: str, tmp_path: Path, quick: Settings) -> None:
    divided = run_experiment(ENTRY.name, *quick, *VARIED, *layout.split(), runs=tmp_path / "divided")
    single = run_experiment(ENTRY.name, *quick, *VARIED, "replicas=1", runs=tmp_path / "single")
    losses = read_losses(divided.folder)
    assert losses == pytest.approx(read_losses(single.folder), abs=1e-9, rel=0)
    assert len(losses) == 16 + 5
    parameters = read_model(divided.folder)[1]
    expected = read_model(single.folder)[1]
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize(("layout", "new_layout"), draw_cases("gpt-resumes", LAYOUT_PAIRS, 1))
def test_a_run_is_resumed_with_another_layout(layout: str, new_layout: str, tmp_path: Path, quick: Settings) -> None:
    """The samples after the resume are those that follow in the text."""
    uninterrupted = run_experiment(ENTRY.name, *quick, *VARIED, *layout.split(), runs=tmp_path / "uninterrupted")
    folder = copy_as_interrupted(uninterrupted.folder, 9, tmp_path / "interrupted")
    resumed = resume_run(ENTRY, folder, *new_layout.split())
    assert "resumed from step 9" in resumed.stdout
    losses = read_losses(folder)
    assert losses == pytest.approx(read_losses(uninterrupted.folder), abs=1e-9, rel=0)
    assert len(losses) == 16 + 5  # 13 steps per epoch: evaluated after the steps 5, 10, 13, 15 and 16
    check_model_of_newest_checkpoint(folder)


@pytest.mark.parametrize("settings", draw_cases("gpt-combinations", split_cases(COMBINATIONS), 1), ids=" ".join)
def test_a_resumed_combination_is_bitwise_equal(settings: Settings, tmp_path: Path, quick: Settings) -> None:
    """The last step of each epoch has one microbatch instead of four."""
    steps = ("dtype=float32", "steps=15", "evaluate_every=7")
    case = (*quick, *VARIED, *FOUR.split(), *steps, *settings)
    uninterrupted = run_experiment(ENTRY.name, *case, runs=tmp_path / "uninterrupted")
    check_resume(ENTRY, uninterrupted, "-".join(settings), tmp_path / "interrupted")


def check_model_of_newest_checkpoint(folder: RunFolder) -> None:
    """Check that the model of a checkpoint is that of the run, and that a damaged checkpoint is skipped."""
    saved = load_model_of_newest_checkpoint(folder)
    assert saved is not None
    step, model = saved
    assert step == 16
    expected = read_model(folder)[1]
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])

    newest = storage.list_resumable_checkpoints(folder)[0]
    file = newest.path / storage.make_rank_file_name(0)
    file.write_bytes(b"damaged")
    older = load_model_of_newest_checkpoint(folder)
    assert older is not None
    assert older[0] == 15


@pytest.mark.drawn
def test_weights_of_a_layout_are_the_initial_weights_of_another_layout(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, *VARIED, "optim.lr=1e-12", "dropout=0")
    trained = run_experiment(ENTRY.name, *quick, *VARIED, "fsdp=2", "optim.lr=0.05", runs=tmp_path / "trained")
    weights = f"weights={trained.folder.path}"
    losses = {}
    for layout in ("tensor=2", "replicas=1"):
        completed = run_experiment(ENTRY.name, *settings, weights, layout, runs=tmp_path / layout)
        losses[layout] = completed.result["test_loss"]
    assert losses["tensor=2"] == pytest.approx(losses["replicas=1"], abs=1e-9, rel=0)
    assert losses["replicas=1"] == pytest.approx(trained.result["test_loss"], abs=1e-6, rel=0)
