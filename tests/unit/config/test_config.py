"""Loading a config: precedence, combinations of settings, help, and unreadable files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import configs
from common.config import config
from common.config.config import StartedRanks, load_config
from common.config.config_keys import list_keys
from common.system.errors import UserError
from configs.ddp_multinode import Config as DataParallelConfig
from configs.mnist_pipeline import Config
from slurm.reports import selection
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.commands.refusals import expect_refusal
from tests.unit.config.conftest import create_run, get_refusal


def test_the_command_line_overrides_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    assert Config().epochs == 1
    assert load_config(Config, [], {}).epochs == 5  # configs/mnist_pipeline.yaml
    assert load_config(Config, ["epochs=3"], {}).epochs == 3
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 9\noptim:\n  lr: 0.5\n")
    settings = load_config(Config, ["--config", str(file), "optim.lr=0.25"], {})
    assert settings.epochs == 9
    assert settings.optim.lr == 0.25
    assert settings.batch == 64


def test_data_root_comes_from_the_environment_unless_it_is_set(tmp_path: Path) -> None:
    environment = {"DATA_ROOT": "/there"}
    assert load_config(Config, [], environment).data.root == "/there"
    assert load_config(Config, ["data.root=/here"], environment).data.root == "/here"
    file = tmp_path / "mine.yaml"
    file.write_text("data:\n  root: /mine\n")
    assert load_config(Config, ["--config", str(file)], environment).data.root == "/mine"


STARTED_RANKS = [
    ("", 3, 1, 3, 1),  # the batch of 63 is not checked for the default of two ranks
    ("", 4, 2, 4, 2),
    ("launch.nodes=2", 4, 1, 4, 2),
    ("processes_per_node=0", 3, 1, 3, 1),
    ("processes_per_node=1", 3, 1, 1, 1),  # is refused later, with the remedy
]


@pytest.mark.parametrize("arguments, ranks, nodes, expected_processes, expected_nodes", STARTED_RANKS)
def test_the_number_of_started_ranks_is_that_of_the_run(
    arguments: str, ranks: int, nodes: int, expected_processes: int, expected_nodes: int
) -> None:
    started = StartedRanks(ranks, nodes)
    settings = load_config(DataParallelConfig, [*arguments.split(), f"batch={21 * ranks}"], started=started)
    assert settings.processes == expected_processes
    assert settings.launch.nodes == expected_nodes
    assert load_config(Config, ["stages=2"], started=started).processes == 2


def test_a_printed_config_contains_all_settings(tmp_path: Path) -> None:
    arguments = ["seed=3", "split=[fc2]", "wandb.tags=[a,010]", "data.root=010", "optim.lr=1e-05"]
    settings = load_config(Config, arguments, {})
    file = tmp_path / "config.yaml"
    file.write_text(config.format_yaml(settings))
    assert load_config(Config, ["--config", str(file)], {}) == settings
    assert settings.wandb.tags == ["a", "010"]
    assert settings.data.root == "010"


INVALID_COMBINATIONS = {
    "microbatches=5": "microbatches=4 or 8 ... batch=60 or 65",
    "microbatches=100": "microbatches=64 ... batch=100",
    "stages=4": "3 layers ... at most 3",
    "stages=3 stages_per_process=2": "stages=3 is not divisible ... [1, 3]",
    "split=[fc2,fc3]": "makes 3 stages ... stages=3",
    "schedule=zigzag": "unknown ... gpipe",
    "schedule=zbv": "schedule=zbv needs two stages per rank ... stages_per_process=2 ... stages=4",
    "schedule=zbv stages=3": "set stages_per_process=2 and an even number of stages, such as stages=6",
    "schedule=dualpipev stages=2 stages_per_process=2 microbatches=1": "as many microbatches as stages ... at least 2",
    "engine=torch stages=1": "at least 2 stages",
    "engine=torch schedule=x.py:f": "engine=own",
    "engine=torch schedule=1f1b microbatches=1": "use at least 2 microbatches",
    "engine=torch schedule=zero_bubble microbatches=5 batch=60": "multiple of 2 ... use microbatches=4",
    "split=[fc9]": "split=[fc9] ... fc2, fc3",
    "stages=3 split=[fc3,fc2]": "split=[fc3,fc2] ... in this order",
    "launch.nodes=3": "launch.nodes=3 ... [1, 2]",
    "data.train_limit=10": "smaller than one batch of 64",
}


@pytest.mark.parametrize("arguments, message", INVALID_COMBINATIONS.items())
def test_settings_that_do_not_fit_together_are_refused(arguments: str, message: str) -> None:
    with expect_refusal(message):
        load_config(Config, arguments.split(), {})


def test_an_elastic_run_cannot_have_ranks_on_gpus() -> None:
    with pytest.raises(UserError, match=r"elastic=true is not available on GPUs, .*; omit launch\.mixed=true"):
        load_config(DataParallelConfig, ["elastic=true", "launch.mixed=true"], {})


def test_a_setting_that_loses_its_effect_is_refused(tmp_path: Path) -> None:
    """For example, if a run with communication=powersgd is repeated with another communication."""
    run = create_run(tmp_path, load_config(DataParallelConfig, ["communication=powersgd", "powersgd_rank=3"], {}))
    arguments = ["--config", str(run / "config.yaml"), "communication=bf16"]
    remedy = "set communication=powersgd or use powersgd_rank=2"
    with pytest.raises(UserError, match=f"powersgd_rank=3 needs communication=powersgd; {remedy}"):
        load_config(DataParallelConfig, arguments, {})
    assert load_config(DataParallelConfig, [*arguments, "powersgd_rank=2"], {}).communication == "bf16"


def test_the_help_lists_each_key_with_default_type_and_documentation() -> None:
    text = config.format_help(Config)
    for key in list_keys(Config).values():
        assert key.doc, f"{key.name} has no documentation"
        assert f"  {key.name}=" in text
    assert "  epochs=5  (int >= 1)" in text
    assert "  optim.decayed=all  (all | matrices)" in text


@pytest.mark.parametrize("option", ["--help", "--print-config"])
def test_help_into_a_closed_pipe_ends_without_a_traceback(option: str) -> None:
    imports = "from common.config import config; from configs.mnist_pipeline import Config"
    command = [sys.executable, "-c", f"{imports}; config.load_config(Config, ['{option}'])"]
    process = subprocess.Popen(command, cwd=config.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(WAIT_TIMEOUT) == 0


def test_a_file_of_settings_and_a_run_to_resume_exclude_each_other(tmp_path: Path) -> None:
    message = get_refusal("--config", str(tmp_path / "new.yaml"), "--resume", str(tmp_path))
    assert "--config and --resume exclude each other" in message


def test_a_path_may_start_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    arguments = ["runs=~/runs", "data.cache=~nobody-here/x", "model=~/net.py:Net", "data.name=~/own.py:load"]
    settings = load_config(Config, arguments, {})
    assert settings.runs == "/home/user/runs"
    assert settings.model == "/home/user/net.py:Net"
    assert settings.data.name == "/home/user/own.py:load"
    assert settings.data.cache == "~nobody-here/x"


INVALID_FILES = {
    "a: [1\n": "settings.yaml: not valid YAML at line 2, column 1 (",
    "batch: 1\nepochs: 1\nbatch: 2\n": "not valid YAML at line 3, column 1 (duplicate key 'batch'); correct the file",
    "? [a]\n: 1\n": "not valid YAML at line 1, column 3 (found unhashable key)",
    "- a\n- b\n": "key: value",
    "batch:\n  size: 3\n": "unknown key batch.size",
}


@pytest.mark.parametrize("text, message", INVALID_FILES.items())
def test_an_invalid_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    assert message in get_refusal("--config", str(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    message = get_refusal("--config", str(tmp_path / "none.yaml"))
    assert "none.yaml: configuration file not found; correct the path" in message


REMEDY = "correct {file}, or use the version of the project that wrote it: "
INVALID_SETTINGS_IN_FILES = {
    "split: fc2]": "split=fc2]: expected a list such as [a,b]; allowed: list",
    "optim.lr: fast": "optim.lr=fast: expected a decimal number; allowed: float from 0 to 100",
    "splits: [fc2]": "unknown key splits; did you mean split?",
    "wandb: {tags: [a, '${']}": "wandb.tags=[a,${]: interpolations are not allowed; allowed: list",
}


@pytest.mark.parametrize("text, message", INVALID_SETTINGS_IN_FILES.items())
def test_an_invalid_setting_in_a_file_is_refused_with_the_name_of_the_file(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    assert get_refusal(f"--config={file}").startswith(REMEDY.format(file=file) + message)

    run = create_run(tmp_path, Config())
    resolved_file = run / "resolved.yaml"
    resolved_file.write_text(text)
    for option in (f"--config={run / 'config.yaml'}", f"--resume={run}"):
        assert get_refusal(option).startswith(REMEDY.format(file=resolved_file) + message)


def test_each_experiment_has_a_config_class() -> None:
    assert "mnist_pipeline" in config.list_experiments()
    for name in config.list_experiments():
        assert config.get_experiment_name(config.import_schema(name)) == name


def test_an_experiment_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^no experiment removed in .*; use the version of the project that has it$"):
        config.import_schema("removed")

    (tmp_path / "broken.py").write_text("import package_that_is_not_installed\n")
    monkeypatch.setattr(configs, "__path__", [*configs.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match=r"package_that_is_not_installed"):
        config.import_schema("broken")


def test_a_config_class_that_is_not_frozen_is_refused_and_its_runs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configs/unfrozen.py", "configs/unfrozen.yaml", "experiments/unfrozen.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    source = "import dataclasses\nfrom configs.shared import TrainingExperiment\n"
    source += "@dataclasses.dataclass\nclass Config(TrainingExperiment): pass\n"
    (tmp_path / "configs/unfrozen.py").write_text(source)
    monkeypatch.setattr(configs, "__path__", [*configs.__path__, str(tmp_path / "configs")])
    monkeypatch.setattr(config, "ROOT", tmp_path)
    message = r"^configs/unfrozen\.py: a config class is not frozen; declare each config class with @dataclass\("
    with pytest.raises(UserError, match=message):
        config.import_schema("unfrozen")
    assert selection.trains_model("unfrozen", {"data.name": "digits"})
    assert not selection.trains_model("unfrozen", {"data.name": "none"})
