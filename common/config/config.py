"""Configuration, merged from dataclass defaults, a YAML file, and `key=value` arguments on the command line.

Command-line arguments override the YAML file, which overrides the defaults. All values are read as text and converted
to the type of their field. For example, `010` is ten, `no` is a string in a string field, and `nan` is rejected.
Interpolations are also rejected, because they would make `config.yaml` depend on the environment.

This module imports neither torch nor the experiments, so that commands on a login node respond quickly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from common.config.changed_settings import Changes, describe_changes, read_changes_of_attempts, read_last_changes
from common.config.command_line import USAGE, parse_command_line, print_text
from common.config.config_keys import (
    check_combinations,
    drop_training_keys,
    format_value,
    has_same_value,
    list_keys,
    parse_value,
    read_values,
    reject_unused_keys,
    replace_values,
    suggest_key,
)
from common.config.yaml_values import describe_yaml_error, flatten_mapping, format_values, load_yaml
from common.system.errors import UserError
from configs.dataparallel import RanksPerNode
from configs.fields import find_group
from configs.shared import Experiment


class CheckedConfig(Protocol):
    """A config dataclass that can check whether its values are compatible with each other."""

    def check(self) -> None: ...


T = TypeVar("T", bound=Experiment)
S = TypeVar("S", bound=CheckedConfig)
ROOT = Path(__file__).resolve().parents[2]
# A resumed run keeps these keys: its data, model, optimizer state, measurements or W&B location depends on them.
FIXED_KEYS = (
    "seed",
    "model",
    "loss",
    "width",
    "depth",
    "layers",
    "heads",
    "key_value_heads",
    "hidden",
    "activation",
    "tied",
    "batch",
    "last_batch",
    "accumulate",
    "start",
    "dtype",
    "ops",
    "dtypes",
    "sizes",
    "algorithms",
    "transports",
    "optim.name",
    "data.name",
    "data.tokenizer",
    "data.context",
    "data.classes",
    "data.train_limit",
    "data.image_size",
    "data.samples",
    "wandb.project",
    "wandb.entity",
)
RANKS_PER_NODE = "processes_per_node"  # sets the number of ranks in experiments without pipeline stages
CONFIG_FILE = "config.yaml"  # the settings with which a run was started
RESOLVED_FILE = "resolved.yaml"  # the settings that a run has measured or chosen, if any


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the values of a YAML file as text, by dotted name. Raises UserError if the file is invalid."""
    try:
        tree = load_yaml(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: configuration file not found; correct the path or create the file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); use a readable text file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML{describe_yaml_error(error)}; correct the file") from None
    tree = tree or {}  # an empty file yields None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines; correct the file")
    return flatten_mapping(tree, origin=f"{path}: ")


def check_settings_file(schema: type[Experiment], file: Path) -> None:
    """Raise UserError, which names the file, for an unknown key or an invalid value in a file with settings."""
    values = read_config_file(file)
    if not values and file.name == RESOLVED_FILE:
        raise UserError(f"{file} is empty; restore it, or delete it so that the run chooses these settings again")
    try:
        parse_values(schema, drop_training_keys(schema, values))
    except UserError as error:
        remedy = f"correct {file}, or use the version of the project that wrote it"
        raise UserError(f"{remedy}: {error}") from None


def list_settings_files(run: Path) -> list[Path]:
    """Return the files that contain the settings of a run: config.yaml, and resolved.yaml if it exists."""
    resolved = run / RESOLVED_FILE
    return [run / CONFIG_FILE, resolved] if resolved.exists() else [run / CONFIG_FILE]


def read_settings(run: Path) -> dict[str, Any]:
    """Read the settings of a run as text, by dotted name: config.yaml, overridden by resolved.yaml if it exists.

    resolved.yaml contains the values that the run has measured or chosen. Older versions stored these values in
    config.yaml. Raises UserError if a file is invalid or config.yaml does not exist.
    """
    settings: dict[str, Any] = {}
    for file in list_settings_files(run):
        settings |= read_config_file(file)
    return settings


def parse_values(schema: type[S], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values, given as text by dotted name, to the types of a config.

    Raises UserError for an unknown key or an invalid value.
    """
    keys = list_keys(schema)
    values: dict[str, Any] = {}
    for text_key, text in texts.items():
        # The name of a group, as in elastic=true, refers to its key `on`.
        name = f"{text_key}.on" if f"{text_key}.on" in keys else text_key
        group = [key for key in keys if key.startswith(f"{name}.")]
        if group:
            raise UserError(f"{name} is a group of settings; set one of its keys: {', '.join(group)}")
        if name not in keys:
            raise UserError(f"unknown key {name}; {suggest_key(name, schema)}")
        values[name] = parse_value(keys[name], text)
    return values


def build_config(schema: type[S], layers: Sequence[Mapping[str, Any]]) -> S:
    """Merge layers of values, given as text, into a validated config.

    Later layers override earlier layers. Raises UserError for an unknown key or an invalid value.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        values |= parse_values(schema, layer)
    settings = replace_values(schema(), values)
    try:
        check_combinations(settings)
        settings.check()
    except ValueError as error:
        raise UserError(str(error)) from None
    reject_unused_keys(settings)
    return settings


@dataclasses.dataclass(frozen=True)
class StartedRanks:
    """Number of ranks that another launcher has started, and the number of nodes on which these ranks run."""

    ranks: int
    nodes: int
    is_restart: bool = False
    """Whether the launcher has restarted the ranks, with the same command line as before."""


def build_config_for_started_ranks(
    schema: type[T], layers: list[Mapping[str, Any]], user_values: Mapping[str, Any], started: StartedRanks | None
) -> T:
    """Build a config for the ranks that another launcher has started.

    If `user_values` sets the number of ranks, the config uses that number instead. Raises UserError if the settings are
    invalid.
    """
    has_key = RANKS_PER_NODE in list_keys(schema)
    is_set = str(user_values.get(RANKS_PER_NODE, "0")) != "0"
    if started is None or is_set or not has_key:
        return build_config(schema, layers)
    with contextlib.suppress(UserError):  # the default number of ranks may be invalid, such as 2 ranks for a batch of 3
        settings = build_config(schema, layers)
        group = find_group(settings, RanksPerNode)
        if settings.processes == started.ranks or (group is not None and group.is_set):
            return settings
    nodes = str(user_values.get("launch.nodes", started.nodes))
    ranks_per_node = started.ranks // int(nodes) if nodes.isdecimal() and int(nodes) else 0
    return build_config(schema, [*layers, {RANKS_PER_NODE: str(ranks_per_node), "launch.nodes": nodes}])


def import_schema(name: str) -> type[Experiment]:
    """Import and return the Config dataclass of the experiment with this name.

    Raises UserError if the experiment does not exist or a config class is not frozen.
    """
    try:
        return importlib.import_module(f"configs.{name}").Config
    except ModuleNotFoundError as error:
        if error.name != f"configs.{name}":
            raise
        raise UserError(f"no experiment {name} in {ROOT}; use the version of the project that has it") from None
    except TypeError as error:
        if "cannot inherit non-frozen dataclass" not in str(error):
            raise
        problem = f"configs/{name}.py: a config class is not frozen"
        raise UserError(f"{problem}; declare each config class with @dataclass(frozen=True)") from None


def list_experiments() -> list[str]:
    """Return the names of all experiments that have a YAML file and a script."""
    names = (path.stem for path in (ROOT / "configs").glob("*.yaml"))
    return sorted(name for name in names if (ROOT / "experiments" / f"{name}.py").exists())


def get_experiment_name(schema: type[Experiment]) -> str:
    """Return the name of the experiment to which a Config dataclass belongs."""
    return schema.__module__.rpartition(".")[2]


def load_config(
    schema: type[T],
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    started: StartedRanks | None = None,
) -> T:
    """Return the config of one run. For --help or --print-config, print the help or the config and exit.

    `started` describes the ranks that another launcher has started. By default, the run has the same number of ranks.
    Raises UserError for an invalid setting, before any rank starts or data is read.
    """
    command_line = parse_command_line(arguments)
    if command_line.help:
        print_text(format_help(schema))
        sys.exit(0)
    environment = {"data.root": environ["DATA_ROOT"]} if environ.get("DATA_ROOT") else {}
    resumed: dict[str, Any] = {}
    user_values: dict[str, Any] = {}
    if command_line.resume:
        from_file = read_resumed_config(schema, command_line.resume, command_line.values)
        resumed = {name: new for name, (_, new) in read_last_changes(command_line.resume).items()}
        user_values |= from_file | resumed
    elif command_line.file:
        from_file = read_repeated_config(schema, command_line.file)
        user_values |= from_file
    else:
        from_file = read_config_file(ROOT / "configs" / f"{get_experiment_name(schema)}.yaml")
    user_values |= command_line.values
    layers: list[Mapping[str, Any]] = []
    for layer in (environment, from_file, resumed):
        layers.append(drop_training_keys(schema, layer))
    layers.append(command_line.values)
    settings = build_config_for_started_ranks(schema, layers, user_values, started)
    is_restart = started is not None and started.is_restart
    if command_line.resume and not is_restart:  # after the first start, the run may have made the requested choice
        reject_repeated_choices(command_line.resume, settings, command_line.values)
    if command_line.print_config:
        print_text(format_yaml(settings).rstrip("\n"))
        sys.exit(0)
    return settings


def read_resumed_config(schema: type[Experiment], run: Path, new_values: Mapping[str, str]) -> dict[str, Any]:
    """Read the settings of a run. Raises UserError if the run cannot be resumed with `new_values`."""
    file = run / CONFIG_FILE
    if not os.path.isfile(file):
        raise UserError(f"--resume {run}: not a run folder (no config.yaml); list the runs with: make status")
    if not read_config_file(file):
        raise UserError(f"{file} is empty; restore it or start a new run")
    name = get_experiment_name(schema)
    experiment = run.absolute().name.rsplit("-", 3)[0]
    if experiment != name:
        remedy = f"resume it with python experiments/{experiment}.py --resume {run}, or name a run of {name}"
        raise UserError(f"--resume {run} is a run of {experiment}, not of {name}; {remedy}")
    for settings_file in list_settings_files(run):
        check_settings_file(schema, settings_file)
    stored = read_settings(run)
    for key in [key for key in list_keys(schema).values() if key.name in FIXED_KEYS and key.name in new_values]:
        old = stored.get(key.name, format_value(key.default))
        if not has_same_value(key, new_values[key.name], old):
            problem = f"{key.name} cannot change when a run is resumed: it was {format_value(old)}"
            raise UserError(f"{problem}; omit it or start a new run")
    return stored


def read_repeated_config(schema: type[Experiment], file: Path) -> dict[str, Any]:
    """Read the file of the option --config. The config.yaml of a run includes the values in its resolved.yaml.

    Raises UserError if a setting is invalid or the run was resumed with other settings.
    """
    files = list_settings_files(file.parent) if file.name == CONFIG_FILE else [file]
    for settings_file in files:
        check_settings_file(schema, settings_file)
    changes = read_changes_of_attempts(file.parent)
    if changes:
        problem = f"{file} contains the initial settings of a run that was resumed with different settings"
        remedy = "to train with the initial settings, copy the file to another folder"
        raise UserError(f"{problem} ({describe_changes(changes)}), so a single run cannot repeat it; {remedy}")
    return read_settings(file.parent) if file.name == CONFIG_FILE else read_config_file(file)


def format_yaml(settings: Experiment) -> str:
    """Return the config as YAML."""
    return format_values(read_values(settings))


# Keys and groups that do not affect training, or that depend on the machine on which a run is resumed.
UNRELATED_KEYS = ("runs", "data.root", "data.cache", "launch.", "log.", "checkpoint.")
# Keys of the group `launch` that a resumed run keeps on every machine.
KEPT_LAUNCH_KEYS = ("launch.backend", "launch.algorithm", "launch.transport", "launch.tls", "launch.mixed")


def find_changes(run: Path, settings: Experiment) -> Changes:
    """Return the training and tracking settings that differ from the settings of a run.

    A setting with the value in config.yaml is not a change if the run has chosen another value, which then applies.
    """
    differences = find_differences(run, settings)
    kept_choices = find_kept_choices(run, differences, type(settings))
    return {name: pair for name, pair in differences.items() if name not in kept_choices}


def find_kept_choices(run: Path, differences: Changes, schema: type[Experiment]) -> list[str]:
    """Return the keys in `differences` for which the choice in resolved.yaml applies.

    The requested value of such a key is the value in config.yaml, which lets the run choose.
    """
    requested = read_config_file(run / CONFIG_FILE)
    keys = list_keys(schema)
    kept_keys = []
    for name, (_, value) in differences.items():
        can_choose_again = not differences.keys().isdisjoint(keys[name].chosen_from)
        if requested.get(name) == value and not can_choose_again:
            kept_keys.append(name)
    return kept_keys


def find_differences(run: Path, settings: Experiment) -> Changes:
    """Return the training and tracking settings whose values differ from those in config.yaml and resolved.yaml."""
    old = read_settings(run)
    new = flatten_mapping(load_yaml(format_yaml(settings)))
    differences = {}
    for name, value in new.items():
        is_unrelated = name.startswith(UNRELATED_KEYS) and name not in KEPT_LAUNCH_KEYS
        if name in old and old[name] != value and not is_unrelated:
            differences[name] = (old[name], value)
    if RANKS_PER_NODE in differences and count_ranks_of_run(old, settings) == settings.processes:
        del differences[RANKS_PER_NODE]  # the run has as many ranks as before, possibly on other hosts
    return differences


def count_ranks_of_run(old: Mapping[str, Any], settings: Experiment) -> int:
    """Return the number of ranks of a run with the settings `old`. `settings` has the setting processes_per_node."""
    group = find_group(settings, RanksPerNode)
    assert group is not None
    keys = list_keys(type(settings))
    ranks_per_node = parse_value(keys[RANKS_PER_NODE], old[RANKS_PER_NODE])
    nodes = parse_value(keys["launch.nodes"], old.get("launch.nodes", "1"))
    return dataclasses.replace(group, processes_per_node=ranks_per_node).count_ranks(nodes)


def reject_repeated_choices(run: Path, settings: Experiment, user_values: Mapping[str, str]) -> None:
    """Raise UserError if a user value requests a choice that a run has already made and keeps."""
    differences = find_differences(run, settings)
    replaced_choices = read_last_changes(run)  # the newest attempt has not used these choices
    for name in find_kept_choices(run, differences, type(settings)):
        if name in user_values and name not in replaced_choices:
            chosen_value, _ = differences[name]
            text = f"{name}={user_values[name]}"
            problem = f"{text} has no effect: the run has already chosen {name}={format_value(chosen_value)}"
            raise UserError(f"{problem}; omit {name}, set another value, or start a new run")


def format_help(schema: type[Experiment]) -> str:
    """Return the help text, which lists each applicable key with its default, type, range and documentation."""
    name = get_experiment_name(schema)
    values = read_config_file(ROOT / "configs" / f"{name}.yaml")
    lines = [f"usage: python experiments/{name}.py {USAGE}", f"       make exp NAME={name} ARGS='key=value ...'", ""]
    for key in list_keys(schema).values():
        default = parse_value(key, values[key.name]) if key.name in values else key.default
        lines.append(f"  {key.name}={format_value(default)}  ({key.allowed})")
        paragraph = " ".join(key.doc.split())
        lines += textwrap.wrap(paragraph, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
