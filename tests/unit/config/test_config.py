"""Reading settings: precedence, types, ranges, and the answers to mistakes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import configs
from common.checkpoint import extension
from common.config import config, config_keys
from common.config.changed_settings import read_changes_of_attempts, read_last_changes
from common.config.config import load_config
from common.config.config_keys import list_keys, replace_values
from common.runs.folder import RunFolder
from common.runs.resolved_settings import record_resolved_settings, warn_of_lost_choice
from common.system.errors import UserError
from configs.ddp_multinode import Config as ElasticConfig
from configs.ddp_multinode import Config as ReplicaConfig
from configs.mnist_pipeline import Config
from configs.profile import Profile
from configs.shared import Experiment
from slurm.reports import selection


@dataclasses.dataclass(frozen=True)
class Measurement(Experiment):
    sizes: list[str] = dataclasses.field(default_factory=list)
    """Sizes to measure."""
    processes = 1


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(Config, list(words), {})
    return str(caught.value)


SCHEMAS: list[type] = [Profile, *(config.import_schema(name) for name in config.list_experiments())]
BOUNDED = {(key.name, key.low, key.high): key for schema in SCHEMAS for key in list_keys(schema).values()}


@pytest.mark.parametrize("key", [key for key in BOUNDED.values() if key.low is not None], ids=lambda key: key.name)
def test_the_least_and_the_largest_value_are_taken_and_those_beyond_refused(key: config_keys.ConfigKey) -> None:
    bounds = [(bound, beyond) for bound, beyond in ((key.low, -1), (key.high, 1)) if bound is not None]
    for bound, beyond in bounds:
        assert config_keys.parse_value(key, str(int(bound)) if key.type is int else str(bound)) == bound
        with pytest.raises(UserError, match="out of range"):
            config_keys.parse_value(key, str(int(bound) + beyond))


def test_command_line_beats_file_beats_default(tmp_path: Path) -> None:
    assert dataclasses.fields(Config) and Config().epochs == 1
    assert load_config(Config, [], {}).epochs == 5  # configs/mnist_pipeline.yaml
    assert load_config(Config, ["epochs=3"], {}).epochs == 3
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 9\noptim:\n  lr: 0.5\n")
    found = load_config(Config, ["--config", str(file), "optim.lr=0.25"], {})
    assert (found.epochs, found.optim.lr, found.batch) == (9, 0.25, 64)


def test_data_root_comes_from_the_environment_unless_it_is_set(tmp_path: Path) -> None:
    assert load_config(Config, [], {"DATA_ROOT": "/there"}).data.root == "/there"
    assert load_config(Config, ["data.root=/here"], {"DATA_ROOT": "/there"}).data.root == "/here"
    file = tmp_path / "mine.yaml"
    file.write_text("data:\n  root: /mine\n")
    assert load_config(Config, ["--config", str(file)], {"DATA_ROOT": "/there"}).data.root == "/mine"


@pytest.mark.parametrize(
    ("words", "ranks", "nodes", "expected"),
    [
        ((), 3, 1, (3, 1)),  # that two ranks could not share the batch of 63 does not count
        ((), 4, 2, (4, 2)),
        (("launch.nodes=2",), 4, 1, (4, 2)),
        (("processes_per_node=0",), 3, 1, (3, 1)),
        (("processes_per_node=1",), 3, 1, (1, 1)),  # which is refused later, with the remedy
    ],
)
def test_ranks_that_were_started_are_those_of_the_run(
    words: tuple[str, ...], ranks: int, nodes: int, expected: tuple[int, int]
) -> None:
    started = config.StartedRanks(ranks, nodes)
    batch = f"batch={21 * ranks}"
    settings = load_config(ElasticConfig, [*words, batch], started=started)
    assert (settings.processes, settings.launch.nodes) == expected
    assert load_config(Config, ["stages=2"], started=started).processes == 2


def test_printed_config_repeats_the_settings(tmp_path: Path) -> None:
    first = load_config(Config, ["seed=3", "split=[fc2]", "wandb.tags=[a,010]", "data.root=010", "optim.lr=1e-05"], {})
    file = tmp_path / "config.yaml"
    file.write_text(config.format_yaml(first))
    assert load_config(Config, ["--config", str(file)], {}) == first
    assert first.wandb.tags == ["a", "010"] and first.data.root == "010"


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("+7", 7), ("0", 0)])
def test_integers_are_decimal(text: str, value: int, tmp_path: Path) -> None:
    assert load_config(Config, [f"seed={text}"], {}).seed == value
    file = tmp_path / "c.yaml"
    file.write_text(f"seed: {text}\n")
    assert load_config(Config, ["--config", str(file)], {}).seed == value


@pytest.mark.parametrize("text", ["12:30", "1_000", "0x10", "1.0", "", "ten", "1e3"])
def test_what_is_no_integer_is_refused(text: str) -> None:
    message = refused(f"seed={text}")
    assert f"seed={text}" in message and "int >= 0" in message


@pytest.mark.parametrize("text", ["nan", "inf", "1_0", "1e999", "x"])
def test_what_is_no_finite_number_is_refused(text: str) -> None:
    assert "float from 0 to 100" in refused(f"optim.lr={text}")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("stage=2", ["unknown key stage", "did you mean stages"]),
        ("lr=2", ["unknown key lr", "optim.lr"]),
        ("optim.learning_rate=2", ["unknown key optim.learning_rate; did you mean optim.lr?"]),
        ("batch_size=2", ["unknown key batch_size; did you mean batch?"]),
        ("nodes=2", ["unknown key nodes; did you mean launch.nodes?"]),
        ("data.rot=x", ["unknown key data.rot", "data.root"]),
        ("zzzz=1", ["unknown key zzzz", "--help"]),
        ("elastic.min=2", ["unknown key elastic.min", "this experiment cannot continue after losing a rank"]),
        ("batch=0", ["batch=0", "int >= 1"]),
        ("data.fallback=cifar", ["data.fallback=cifar", "digits | none"]),
        ("data=3", ["data is a group of settings; set one of its keys: data.name, data.root"]),
        ("data.root=${oc.env:HOME}", ["data.root", "interpolations"]),
        ("split=[a,[b]]", ["split", "expected a list such as [a,b]"]),
        ("stages", ["unexpected argument 'stages'", "key=value"]),
        ("--fast", ["unexpected argument '--fast'", "no spaces, no leading dashes"]),
        ("--config", ["--config requires a file"]),
    ],
)
def test_mistakes_are_answered_with_the_remedy(word: str, parts: list[str]) -> None:
    message = refused(word)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("lr=0.1", "unknown key lr; this experiment trains no model and has no settings for training; omit this key"),
        ("batch_size=8", "this experiment trains no model"),
        ("epoch=3", "this experiment trains no model"),
        ("size=[4]", "unknown key size; did you mean sizes?"),
        ("checkpoint.best=test_loss", "this experiment trains no model; use checkpoint.best=none"),
    ],
)
def test_a_measurement_refuses_settings_for_training(word: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        config.build_config(Measurement, [dict([word.split("=")])])
    assert remedy in str(caught.value)


def test_a_finished_measurement_cannot_be_extended(tmp_path: Path) -> None:
    settings = config.build_config(Measurement, [])
    (tmp_path / "config.yaml").write_text(config.format_yaml(settings))
    (tmp_path / "result.json").write_text('{"state": "finished"}')
    with pytest.raises(UserError, match=r"is finished: sizes \[\] -> \[4\] has no effect; start a new run$"):
        extension.check_resume(RunFolder(tmp_path), replace_values(settings, {"sizes": ["4"]}))


def test_a_key_of_elastic_is_corrected_where_there_are_some() -> None:
    with pytest.raises(UserError, match=r"unknown key elastic.timeot; did you mean elastic.timeout\?"):
        load_config(ElasticConfig, ["elastic.timeot=1"], {})


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["microbatches=5"], ["microbatches=4 or 8", "batch=60 or 65"]),
        (["microbatches=100"], ["microbatches=64", "batch=100"]),
        (["stages=4"], ["3 layers", "at most 3"]),
        (["stages=3", "stages_per_process=2"], ["stages=3 is not divisible", "[1, 3]"]),
        (["split=[fc2,fc3]"], ["makes 3 stages", "stages=3"]),
        (["schedule=zigzag"], ["unknown", "gpipe"]),
        (["schedule=zero_bubble"], ["engine=torch"]),
        (["engine=torch", "stages=1"], ["at least 2 stages"]),
        (["engine=torch", "schedule=x.py:f"], ["engine=own"]),
        (["engine=torch", "schedule=1f1b", "microbatches=1"], ["microbatches to 2 or more"]),
        (
            ["engine=torch", "schedule=zero_bubble", "microbatches=5", "batch=60"],
            ["multiple of 2", "use microbatches=4"],
        ),
        (["split=[fc9]"], ["split=[fc9]", "fc2, fc3"]),
        (["stages=3", "split=[fc3,fc2]"], ["split=[fc3,fc2]", "in this order"]),
        (["launch.nodes=3"], ["launch.nodes=3", "[1, 2]"]),
        (["data.train_limit=10"], ["smaller than one batch of 64"]),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(words: list[str], parts: list[str]) -> None:
    message = refused(*words)
    assert all(part in message for part in parts), message


def test_a_setting_that_loses_its_effect_is_put_back_to_its_default(tmp_path: Path) -> None:
    """As where a run with communication=powersgd is repeated with another communication."""
    file = tmp_path / "config.yaml"
    file.write_text(config.format_yaml(load_config(ReplicaConfig, ["communication=powersgd", "powersgd_rank=3"], {})))
    words = ["--config", str(file), "communication=bf16"]
    remedy = "set communication=powersgd or use powersgd_rank=2"
    with pytest.raises(UserError, match=f"powersgd_rank=3 needs communication=powersgd; {remedy}"):
        load_config(ReplicaConfig, words, {})
    assert load_config(ReplicaConfig, [*words, "powersgd_rank=2"], {}).communication == "bf16"


def test_help_names_every_key_with_default_type_and_meaning() -> None:
    text = config.format_help(Config)
    for key in list_keys(Config).values():
        assert key.doc, f"{key.name} has no documentation"
        assert f"  {key.name}=" in text
    assert "  epochs=5  (int >= 1)" in text
    assert "  optim.decayed=all  (all | matrices)" in text


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "none.yaml: configuration file not found; correct the path" in refused(
        "--config", str(tmp_path / "none.yaml")
    )
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1\n")
    assert "bad.yaml: not valid YAML at line 2, column 1; correct the file" in refused("--config", str(bad))
    bad.write_text("- a\n- b\n")
    assert "key: value" in refused("--config", str(bad))
    bad.write_text("batch:\n  size: 3\n")
    assert "unknown key batch.size" in refused("--config", str(bad))


def test_every_experiment_has_script_settings_and_values() -> None:
    assert "mnist_pipeline" in config.list_experiments()
    for name in config.list_experiments():
        assert config.get_experiment_name(config.import_schema(name)) == name


def test_changed_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "attempts/0001/changed.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"devices": [["auto"], ["cpu", "cpu"]], "optim.lr": ["0.1", "0.2"]}')
    found = read_last_changes(tmp_path)
    assert found == {"devices": (["auto"], ["cpu", "cpu"]), "optim.lr": ("0.1", "0.2")}
    for text in ("", "[1]", '{"optim.lr": "0.1"}', '{"optim.lr": ["0.1"]}', '{"optim.lr": ["0.1", null]}'):
        file.write_text(text)
        with pytest.raises(UserError, match=r"changed.json is damaged"):
            read_last_changes(tmp_path)


def test_what_a_run_has_chosen_overrides_its_config(tmp_path: Path) -> None:
    """An attempt with the settings of config.yaml has no changes: it uses what the run has chosen."""
    run = tmp_path / "mnist_pipeline-1-2-3"
    run.mkdir()
    (run / "config.yaml").write_text(config.format_yaml(load_config(Config, ["balance=time"], {})))
    record_resolved_settings(run, {"data.name": "digits"})
    record_resolved_settings(run, {"split": ["fc3"]})
    file = run / "config.yaml"
    assert config.read_config_file(file)["data.name"] == "mnist" and config.read_settings(run)["split"] == ["fc3"]

    requested = load_config(Config, ["balance=time"], {})
    resumed = load_config(Config, ["--resume", str(run)], {})
    assert load_config(Config, ["--config", str(file)], {}) == resumed != requested
    assert (resumed.data.name, resumed.pipeline.split) == ("digits", ["fc3"])
    assert config.find_changes(run, requested) == config.find_changes(run, resumed) == {}
    requeued = replace_values(requested, {"optim.lr": 0.05})
    assert config.find_changes(run, requeued) == {"optim.lr": ("0.02", "0.05")}, "the split that it lacks is no change"
    other = replace_values(resumed, {"stages": 1, "split": []})
    assert config.find_changes(run, other) == {"stages": ("2", "1"), "split": (["fc3"], [])}

    refusal = r"split=\[\] has no effect: the run has already chosen split=\[fc3\]; omit split, set another"
    for words in (["split=[]"], ["split=[]", "optim.lr=0.05"]):
        with pytest.raises(UserError, match=refusal):
            load_config(Config, ["--resume", str(run), *words], {})
    restarted = config.StartedRanks(ranks=2, nodes=1, is_restart=True)
    assert load_config(Config, ["--resume", str(run), "split=[]"], {}, restarted).pipeline.split == []
    for words in (
        ["split=[fc2]"],
        ["stages=1", "split=[]"],
        ["balance=parameters", "split=[]"],
        ["balance=time"],
        ["log.level=debug"],
    ):
        load_config(Config, ["--resume", str(run), *words], {})

    (run / "resolved.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"resolved\.yaml: not valid YAML at line 2, column 1; correct the file"):
        config.read_settings(run)


def test_the_choice_of_a_run_may_be_requested_if_the_newest_attempt_has_replaced_it(tmp_path: Path) -> None:
    run = tmp_path / "ddp_multinode-1-2-3"
    attempt = run / "attempts/0002"
    attempt.mkdir(parents=True)
    initial = load_config(ReplicaConfig, ["launch.backend=builtin", "launch.algorithm=auto"], {})
    (run / "config.yaml").write_text(config.format_yaml(initial))
    record_resolved_settings(run, {"launch.algorithm": "tree"})
    words = [f"--resume={run}", "launch.algorithm=auto"]
    with pytest.raises(UserError, match=r"already chosen launch\.algorithm=tree; omit launch\.algorithm,"):
        load_config(ReplicaConfig, words, {})
    (attempt / "changed.json").write_text(json.dumps({"launch.algorithm": ["tree", "star"]}))
    assert load_config(ReplicaConfig, words[:1], {}).launch.algorithm == "star"
    assert config.find_changes(run, load_config(ReplicaConfig, words, {})) == {}, "the run's own choice applies again"


def test_a_config_class_that_is_not_frozen_is_refused_and_its_runs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configs/unfrozen.py", "configs/unfrozen.yaml", "experiments/unfrozen.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    source = "import dataclasses\nfrom configs.shared import TrainingExperiment\n"
    source += "@dataclasses.dataclass\nclass Config(TrainingExperiment): pass\n"
    (tmp_path / "configs/unfrozen.py").write_text(source)
    monkeypatch.setattr(configs, "__path__", [*configs.__path__, str(tmp_path / "configs")])
    monkeypatch.setattr(config, "ROOT", tmp_path)
    refusal = r"^configs/unfrozen\.py: a config class is not frozen; declare each config class with @dataclass\("
    with pytest.raises(UserError, match=refusal):
        config.import_schema("unfrozen")
    found = [selection.trains_model("unfrozen", {"data.name": name}) for name in ("digits", "none")]
    assert found == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("split: fc2]", "correct {file}: split=fc2]: expected a list such as [a,b]; allowed: list"),
        ("optim.lr: fast", "correct {file}: optim.lr=fast: expected a decimal number; allowed: float from 0 to 100"),
        ("splits: [fc2]", "correct {file}: unknown key splits; did you mean split?"),
    ],
)
def test_a_wrong_setting_in_a_file_is_refused_with_the_name_of_the_file(
    text: str, message: str, tmp_path: Path
) -> None:
    run = tmp_path / "mnist_pipeline-1-2-3"
    run.mkdir()
    (run / "config.yaml").write_text(config.format_yaml(Config()))
    for name, options in (
        ("own.yaml", [f"--config={tmp_path / 'own.yaml'}"]),
        ("mnist_pipeline-1-2-3/resolved.yaml", [f"--config={run / 'config.yaml'}", f"--resume={run}"]),
    ):
        file = tmp_path / name
        file.write_text(text)
        for option in options:
            assert refused(option).startswith(message.format(file=file))


def test_an_empty_file_of_choices_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "mnist_pipeline-1-2-3"
    run.mkdir()
    (run / "config.yaml").write_text(config.format_yaml(Config()))
    (run / "resolved.yaml").touch()
    remedy = "resolved.yaml is empty; restore it, or delete it so that the run chooses these settings again"
    for option in (f"--config={run / 'config.yaml'}", f"--resume={run}"):
        assert remedy in refused(option)


def test_a_choice_that_is_gone_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    warn_of_lost_choice(tmp_path, "split")
    assert not capsys.readouterr().err, "no attempt has trained"
    folder.claim_attempt().record_parent_attempt(None, 0)
    warn_of_lost_choice(tmp_path, "split")
    warning = f"WARNING: {tmp_path}/resolved.yaml no longer contains split, which earlier attempts have chosen"
    assert capsys.readouterr().err.startswith(warning)


def test_how_ranks_communicate_is_kept_and_where_they_run_is_not(tmp_path: Path) -> None:
    run = tmp_path / "ddp_multinode-1-2-3"
    run.mkdir()
    (run / "config.yaml").write_text(config.format_yaml(ReplicaConfig()))
    kept = {
        "launch.backend": ("auto", "builtin"),
        "launch.algorithm": ("ring", "tree"),
        "launch.tls": ("false", "true"),
    }
    words = [f"{name}={new}" for name, (_, new) in kept.items()]
    resumed = load_config(ReplicaConfig, [f"--resume={run}", *words, "launch.threads=3", "launch.step_timeout=7"], {})
    changes = config.find_changes(run, resumed)
    assert changes == kept

    file = run / "attempts/0002/changed.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(changes))
    again = load_config(ReplicaConfig, [f"--resume={run}"], {})
    assert (again.launch.backend, again.launch.algorithm, again.launch.tls) == ("builtin", "tree", True)
    with pytest.raises(UserError, match=r"launch\.backend auto -> builtin, launch\.algorithm ring -> tree"):
        load_config(ReplicaConfig, [f"--config={run / 'config.yaml'}"], {})
    file.write_text(json.dumps({"launch.tls": ["false", "true"], "launch.transport": ["auto", "network"]}))
    assert read_changes_of_attempts(run) == {}, "they do not affect results, so a single run can repeat them"


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ([], ["processes_per_node=2"], False),
        (["processes_per_node=2"], ["processes_per_node=0"], False),
        ([], ["launch.nodes=2", "processes_per_node=1"], False),
        ([], ["processes_per_node=4"], True),
    ],
)
def test_the_automatic_number_of_ranks_may_be_given(
    old: list[str], new: list[str], changed: bool, tmp_path: Path
) -> None:
    run = tmp_path / "ddp_multinode-1-2-3"
    run.mkdir()
    (run / "config.yaml").write_text(config.format_yaml(load_config(ReplicaConfig, old, {})))
    resumed = load_config(ReplicaConfig, [f"--resume={run}", *new], {})
    assert bool(config.find_changes(run, resumed)) is changed


@pytest.mark.parametrize("option", ["--help", "--print-config"])
def test_help_into_a_pipe_that_nobody_reads_ends_without_a_traceback(option: str) -> None:
    imports = "from common.config import config; from configs.mnist_pipeline import Config"
    source = f"{imports}; config.load_config(Config, ['{option}'])"
    done = subprocess.Popen(
        [sys.executable, "-c", source], cwd=config.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.stdout and done.stderr
    done.stdout.close()
    assert (done.stderr.read(), done.wait(60)) == ("", 0)
