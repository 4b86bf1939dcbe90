"""Pruned models as files that need nothing of this project: each model's program, and what a run says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.models import exporting, networks, pruning_savings
from common.models.pruning_masks import Masks
from tests.harness.processes import run


@pytest.mark.parametrize("name", ["lenet300", "convnet", "resnet18"])
def test_the_exported_model_runs_without_this_project_for_any_number_of_samples(name: str, tmp_path: Path) -> None:
    model, path = networks.build_network(name, (28, 28), 10), tmp_path / "model.pt2"
    Masks(model)
    bare, x = pruning_savings.strip_masks(model), torch.randn(3, 28, 28)
    facts = pruning_savings.export_and_compare(bare, x[:1], path)
    assert facts["export_difference"] < 1e-5 and facts["export_bytes"] == path.stat().st_size
    with torch.no_grad():
        assert torch.allclose(exporting.run_in_new_process(path, x), bare(x), atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_a_program_that_cannot_be_written_or_run_is_told(tmp_path: Path) -> None:
    model, x = networks.Toy((10,), 5).eval(), torch.randn(3, 10)
    (tmp_path / "model.pt2").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match="cannot be run by itself"):
        exporting.run_in_new_process(tmp_path / "model.pt2", x)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert pruning_savings.export_and_compare(model, x, tmp_path / "nowhere" / "model.pt2").keys() == {"export_problem"}


def test_a_resnet_on_colour_images_is_pruned_and_exported(cache: Path, tmp_path: Path) -> None:
    images = ("data.name=generated", f"data.cache={cache}", "data.image_size=16", "data.samples=64")
    words = ("model=resnet18", "batch=8", "eval_batch=8", "epochs=1", "steps=4", "every=1", "optim.warmup=0")
    done = run("sparse_prune", *images, *words, "processes_per_node=2", "launch.threads=1", runs=tmp_path)
    assert done.status == 0, done.err
    result = done.result
    assert result["nonzero"] == result["weights"] - round(0.92 * result["weights"]) and result["weights"] > 11e6
    assert result["export_difference"] < 1e-3
    assert (done.folder.path / "model.pt2").stat().st_size == result["export_bytes"]
    assert "run elsewhere, outputs differ by" in done.out
