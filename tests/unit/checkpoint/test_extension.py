"""Whether a run can be resumed with the given settings, before ranks start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common.checkpoint import extension, storage
from common.config import config
from common.config.config_keys import replace_values
from common.runs.folder import RunFolder
from common.system.errors import UserError
from configs.ddp_multinode import Config
from tests.harness.environment.permissions import enforce_permissions
from tests.harness.experiments.measurement_config import Measurement
from tests.unit.checkpoint.conftest import RunWithCheckpoints


def write_config(folder: RunFolder) -> None:
    (folder.path / "config.yaml").write_text(config.format_yaml(Config()))


def test_an_unreadable_checkpoints_folder_is_refused(run: RunWithCheckpoints) -> None:
    """Its checkpoints cannot be found, so the run would restart from step 0."""
    write_config(run.folder)
    run.save(1)
    checkpoints_folder = run.get_checkpoint(1).parent
    checkpoints_folder.chmod(0)
    with enforce_permissions(), pytest.raises(UserError, match=r"/checkpoints cannot be read; .* run chmod -R u\+rwX "):
        extension.check_resume(run.folder, Config())
    checkpoints_folder.chmod(0o700)
    with enforce_permissions():
        extension.check_resume(run.folder, Config())


def test_a_finished_measurement_cannot_be_extended(tmp_path: Path) -> None:
    settings = config.build_config(Measurement, [])
    (tmp_path / "config.yaml").write_text(config.format_yaml(settings))
    (tmp_path / "result.json").write_text('{"state": "finished"}')
    with pytest.raises(UserError, match=r"is finished: sizes \[\] -> \[4\] has no effect; start a new run$"):
        extension.check_resume(RunFolder(tmp_path), replace_values(settings, {"sizes": ["4"]}))


def test_fewer_epochs_than_the_run_has_begun_are_refused(run: RunWithCheckpoints) -> None:
    write_config(run.folder)
    run.save(1)
    checkpoint = storage.list_resumable_checkpoints(run.folder)[0]
    facts = {"epoch": 2, "position": 5}
    manifest = dataclasses.replace(storage.read_manifest(checkpoint), facts=facts)
    (checkpoint.path / storage.MANIFEST).write_text(manifest.to_json())
    with pytest.raises(UserError, match=r"epochs=2 is less than the 3 epochs that .* has begun; use epochs=3 or more"):
        extension.check_resume(run.folder, Config(epochs=2))
    extension.check_resume(run.folder, Config(epochs=3))


def test_other_initial_weights_are_refused_if_the_run_resumes_from_a_checkpoint(run: RunWithCheckpoints) -> None:
    write_config(run.folder)
    changed = replace_values(Config(), {"weights": "best.pt"})
    extension.check_resume(run.folder, changed)  # without a checkpoint, the run starts from these weights
    run.save(1)
    with pytest.raises(UserError, match=r"weights=best.pt has no effect, because the run resumes from a checkpoint"):
        extension.check_resume(run.folder, changed)


def test_the_initial_weights_of_a_job_may_be_named_as_in_its_first_command(run: RunWithCheckpoints) -> None:
    settings = replace_values(Config(), {"weights": "/runs/ddp_multinode-20260101-000000-4f1c"})
    (run.folder.path / "config.yaml").write_text(config.format_yaml(settings))
    run.save(1)
    extension.check_resume(run.folder, replace_values(Config(), {"weights": "4f1c"}))
    with pytest.raises(UserError, match=r"weights=4f1d has no effect"):
        extension.check_resume(run.folder, replace_values(Config(), {"weights": "4f1d"}))


@pytest.mark.parametrize("steps, remedy", [(0, "increase epochs"), (9, "increase steps")])
def test_a_finished_run_names_the_setting_that_extends_it(steps: int, remedy: str, run: RunWithCheckpoints) -> None:
    cfg = Config(steps=steps)
    (run.folder.path / "config.yaml").write_text(config.format_yaml(cfg))
    run.save(9)
    (run.folder.path / "result.json").write_text('{"state": "finished"}')
    (run.folder.path / "model.json").write_text('{"step": 9, "epoch_steps": 9}')
    with pytest.raises(UserError, match=f"has no effect; {remedy}, or start a new run"):
        extension.check_resume(run.folder, replace_values(cfg, {"optim.lr": 7.0}))


def test_a_finished_run_without_its_model_gets_a_remedy_that_works(tmp_path: Path) -> None:
    write_config(RunFolder(tmp_path))
    (tmp_path / "result.json").write_text('{"state": "finished"}')
    with pytest.raises(UserError, match=r"has no effect; restore model.json to extend the run, or start a new run"):
        extension.check_resume(RunFolder(tmp_path), Config(epochs=7))
