"""Exported programs of pruned models run without this project, and runs report how they compare."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from common.models import exporting, model_file, networks
from common.techniques.pruning import pruning_savings
from common.techniques.pruning.pruning_masks import Masks
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.experiments.exported_programs import run_exported_program


def check_other_batch_size(path: Path, model: nn.Module, *shape: int) -> None:
    """Check that a program computes a model's outputs for another number of samples than it was exported with."""
    images = torch.randn(3, *shape)
    with torch.no_grad():
        assert torch.allclose(run_exported_program(path, images), model(images), atol=1e-5)


@pytest.mark.parametrize("name", ["lenet300", "convnet"])
def test_the_exported_model_computes_the_same_outputs_for_any_number_of_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models are executed in this process; the ResNet below in a process without this project."""
    monkeypatch.setattr(exporting, "run_exported_program_in_new_process", run_exported_program)
    model = networks.build_network(name, (28, 28), 10)
    path = tmp_path / "model.pt2"
    Masks(model)
    bare = pruning_savings.strip_masks(model)
    facts = pruning_savings.export_and_compare(bare, bare, torch.randn(1, 28, 28), path)
    assert facts["export_difference"] < 1e-5
    assert facts["export_bytes"] == path.stat().st_size
    check_other_batch_size(path, bare, 28, 28)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_a_program_that_cannot_be_written_or_run_is_reported(tmp_path: Path) -> None:
    model = networks.Toy((10,), 5).eval()
    inputs = torch.randn(3, 10)
    (tmp_path / "model.pt2").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match="does not run in a new process"):
        exporting.run_exported_program_in_new_process(tmp_path / "model.pt2", inputs)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    facts = pruning_savings.export_and_compare(model, model, inputs, tmp_path / "nowhere" / "model.pt2")
    assert facts.keys() == {"export_problem"}


@pytest.mark.drawn
def test_a_resnet_on_colour_images_is_pruned_and_exported(cache: Path, tmp_path: Path) -> None:
    images = ("data.name=generated", f"data.cache={cache}", "data.image_size=16", "data.samples=64")
    training = ("model=resnet18", "batch=8", "eval_batch=8", "epochs=1", "steps=2", "every=1", "optim.warmup=0")
    ranks = ("processes_per_node=2", "launch.threads=1")
    completed = run_experiment("sparse_prune", *images, *training, *ranks, "int8=false", runs=tmp_path)
    result = completed.result
    assert result["nonzero"] == result["weights"] - round(0.92 * result["weights"])
    assert result["weights"] > 11e6
    assert result["export_difference"] < 1e-3
    assert (completed.folder.path / "model.pt2").stat().st_size == result["export_bytes"]
    assert "in a new process, outputs differ by" in completed.stdout
    _, model = model_file.load_model(completed.folder)
    check_other_batch_size(completed.folder.path / "model.pt2", model, 3, 16, 16)


def test_a_network_without_pruned_channels_is_exported(
    digits: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make export` checks that the exported network, which has fewer channels, has the same outputs."""
    training = ("model=lenet5", "scope=structured", "sparsity=0.5", "steps=20", "every=5", "int8=false", "batch=16")
    completed = run_experiment(
        "sparse_prune", *digits, *training, "processes_per_node=1", "export=false", runs=tmp_path
    )
    result = completed.result
    assert result["parameters"] == 431_080
    # half of 20, 50 and 500 channels, with a bias each
    expected = 10 * 26 + 25 * (10 * 25 + 1) + 250 * (25 * 16 + 1) + 10 * 251
    assert result["parameters_of_kept_channels"] == expected
    assert f"without those whose weights are zero: {expected:,} of 431,080 parameters" in completed.stdout

    monkeypatch.setattr(exporting, "run_exported_program_in_new_process", run_exported_program)
    exported = in_process_calls.call_verb("export", "--format=torch.export", "--", str(completed.folder.path))
    assert f"removed {431_080 - expected:,} parameters of channels whose weights are zero" in exported.stdout
    program = torch.export.load(completed.folder.path / "model.pt2")
    assert sum(parameter.numel() for parameter in program.parameters()) == expected
