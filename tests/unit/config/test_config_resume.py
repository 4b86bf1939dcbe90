"""Settings of a resumed run: choices of the run, changes of attempts, and differences to the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import config
from common.config.changed_settings import read_changes_of_attempts
from common.config.config import StartedRanks, load_config
from common.config.config_keys import replace_values
from common.runs.resolved_settings import record_resolved_settings
from common.system.errors import UserError
from configs.ddp_multinode import Config as DataParallelConfig
from configs.mnist_pipeline import Config
from configs.resnet_dataparallel import Config as ResNetConfig
from tests.unit.config.conftest import create_run, get_refusal


@pytest.fixture
def run_with_choices(tmp_path: Path) -> Path:
    """Create a run that replaced its data set and measured its split."""
    run = create_run(tmp_path, load_config(Config, ["balance=time"], {}))
    record_resolved_settings(run, {"data.name": "digits"})
    record_resolved_settings(run, {"split": ["fc3"]})
    return run


def test_choices_of_a_run_override_its_config(run_with_choices: Path) -> None:
    """An attempt with the settings of config.yaml has no changes: it uses the choices of the run."""
    run = run_with_choices
    file = run / "config.yaml"
    assert config.read_config_file(file)["data.name"] == "mnist"
    assert config.read_settings(run)["split"] == ["fc3"]

    requested = load_config(Config, ["balance=time"], {})
    resumed = load_config(Config, ["--resume", str(run)], {})
    assert resumed != requested
    assert load_config(Config, ["--config", str(file)], {}) == resumed
    assert resumed.data.name == "digits"
    assert resumed.pipeline.split == ["fc3"]

    assert config.find_changes(run, requested) == {}
    assert config.find_changes(run, resumed) == {}
    requeued = replace_values(requested, {"optim.lr": 0.05})
    assert config.find_changes(run, requeued) == {"optim.lr": ("0.02", "0.05")}, "a missing split is not a change"
    single_stage = replace_values(resumed, {"stages": 1, "split": []})
    assert config.find_changes(run, single_stage) == {"stages": ("2", "1"), "split": (["fc3"], [])}


@pytest.mark.parametrize("arguments", [["split=[]"], ["split=[]", "optim.lr=0.05"]])
def test_a_request_to_choose_again_is_refused(run_with_choices: Path, arguments: list[str]) -> None:
    message = r"split=\[\] has no effect: the run has already chosen split=\[fc3\]; omit split, set another"
    with pytest.raises(UserError, match=message):
        load_config(Config, ["--resume", str(run_with_choices), *arguments], {})


ACCEPTED_ARGUMENTS = [
    ["split=[fc2]"],
    ["stages=1", "split=[]"],
    ["balance=parameters", "split=[]"],
    ["balance=time"],
    ["log.level=debug"],
]


@pytest.mark.parametrize("arguments", ACCEPTED_ARGUMENTS)
def test_other_settings_are_accepted_after_a_choice(run_with_choices: Path, arguments: list[str]) -> None:
    load_config(Config, ["--resume", str(run_with_choices), *arguments], {})


def test_a_restarted_attempt_may_choose_again(run_with_choices: Path) -> None:
    restarted = StartedRanks(ranks=2, nodes=1, is_restart=True)
    settings = load_config(Config, ["--resume", str(run_with_choices), "split=[]"], {}, restarted)
    assert settings.pipeline.split == []


def test_an_invalid_file_of_choices_is_refused(run_with_choices: Path) -> None:
    (run_with_choices / "resolved.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"resolved\.yaml: not valid YAML at line 2, column 1 \(.*\); correct the file"):
        config.read_settings(run_with_choices)


def test_an_empty_file_of_choices_is_refused(tmp_path: Path) -> None:
    run = create_run(tmp_path, Config())
    (run / "resolved.yaml").touch()
    remedy = "resolved.yaml is empty; restore it, or delete it so that the run chooses these settings again"
    for option in (f"--config={run / 'config.yaml'}", f"--resume={run}"):
        assert remedy in get_refusal(option)


def write_changes(run: Path, changes: object) -> None:
    """Write the changed settings of attempt 2."""
    file = run / "attempts/0002/changed.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(changes))


def test_the_choice_of_a_run_may_be_requested_if_the_newest_attempt_has_replaced_it(tmp_path: Path) -> None:
    arguments = ["launch.backend=builtin", "launch.algorithm=auto"]
    run = create_run(tmp_path, load_config(DataParallelConfig, arguments, {}))
    record_resolved_settings(run, {"launch.algorithm": "tree"})
    resume_arguments = [f"--resume={run}", "launch.algorithm=auto"]
    (run / "attempts/0002").mkdir(parents=True)
    with pytest.raises(UserError, match=r"already chosen launch\.algorithm=tree; omit launch\.algorithm,"):
        load_config(DataParallelConfig, resume_arguments, {})

    write_changes(run, {"launch.algorithm": ["tree", "star"]})
    assert load_config(DataParallelConfig, [f"--resume={run}"], {}).launch.algorithm == "star"
    resumed = load_config(DataParallelConfig, resume_arguments, {})
    assert config.find_changes(run, resumed) == {}, "the choice of the run applies again"


def test_a_resumed_run_keeps_its_number_of_steps_per_epoch(tmp_path: Path) -> None:
    run = create_run(tmp_path, ResNetConfig())
    with pytest.raises(UserError, match=r"^last_batch cannot change when a run is resumed: it was keep; omit it"):
        load_config(ResNetConfig, [f"--resume={run}", "last_batch=drop"], {})


def test_a_fixed_setting_may_be_repeated_in_another_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = create_run(tmp_path, load_config(DataParallelConfig, ["batch=24", f"model={tmp_path}/net.py:Net"], {}))
    resumed = load_config(DataParallelConfig, [f"--resume={run}", "batch=024", "model=~/net.py:Net"], {})
    assert config.find_changes(run, resumed) == {}
    for change in ("batch=48", "model=~/other.py:Net"):
        with pytest.raises(UserError, match="cannot change when a run is resumed: it was"):
            load_config(DataParallelConfig, [f"--resume={run}", change], {})
    with pytest.raises(UserError, match="batch=many: expected an integer"):
        load_config(DataParallelConfig, [f"--resume={run}", "batch=many"], {})


def test_a_fixed_setting_that_an_older_version_did_not_have_keeps_its_default(tmp_path: Path) -> None:
    run = create_run(tmp_path, ResNetConfig())
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("last_batch: keep\n", ""))
    load_config(ResNetConfig, [f"--resume={run}", "last_batch=keep"], {})
    with pytest.raises(UserError, match=r"^last_batch cannot change when a run is resumed: it was keep;"):
        load_config(ResNetConfig, [f"--resume={run}", "last_batch=drop"], {})


def test_changes_of_the_communication_are_kept_and_those_of_the_launch_are_not(tmp_path: Path) -> None:
    run = create_run(tmp_path, DataParallelConfig())
    communication = ["launch.backend=builtin", "launch.algorithm=tree", "launch.tls=true"]
    launch = ["launch.threads=3", "launch.step_timeout=7"]
    resumed = load_config(DataParallelConfig, [f"--resume={run}", *communication, *launch], {})
    changes = config.find_changes(run, resumed)
    assert changes == {
        "launch.backend": ("auto", "builtin"),
        "launch.algorithm": ("ring", "tree"),
        "launch.tls": ("false", "true"),
    }

    write_changes(run, changes)
    settings = load_config(DataParallelConfig, [f"--resume={run}"], {})
    assert settings.launch.backend == "builtin"
    assert settings.launch.algorithm == "tree"
    assert settings.launch.tls is True
    with pytest.raises(UserError, match=r"launch\.backend auto -> builtin, launch\.algorithm ring -> tree"):
        load_config(DataParallelConfig, [f"--config={run / 'config.yaml'}"], {})

    # Encryption and transport do not affect results, so a single run can repeat them.
    write_changes(run, {"launch.tls": ["false", "true"], "launch.transport": ["auto", "network"]})
    assert read_changes_of_attempts(run) == {}


CHANGES_OF_RANKS = [
    ("", "processes_per_node=2", False),
    ("processes_per_node=2", "processes_per_node=0", False),
    ("", "launch.nodes=2 processes_per_node=1", False),
    ("", "processes_per_node=4", True),
]


@pytest.mark.parametrize("old_arguments, new_arguments, is_change", CHANGES_OF_RANKS)
def test_setting_the_automatic_number_of_ranks_is_not_a_change(
    old_arguments: str, new_arguments: str, is_change: bool, tmp_path: Path
) -> None:
    run = create_run(tmp_path, load_config(DataParallelConfig, old_arguments.split(), {}))
    resumed = load_config(DataParallelConfig, [f"--resume={run}", *new_arguments.split()], {})
    assert bool(config.find_changes(run, resumed)) is is_change
