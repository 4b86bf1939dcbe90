"""Configuration: dataclass defaults < YAML file < `key=value` on the command line, typed and checked.

Every value, from a file or from the command line, arrives as text and is read by the type of its
field: `010` is ten, `no` stays a string where a string is wanted, `nan` is refused. Interpolations
are refused too, because `config.yaml` would then hold what the environment holds.

Imports neither torch nor the experiments, so that it can answer on a login node at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml
from omegaconf import OmegaConf

from common.core.config_keys import list_keys, parse_value, refuse_unused_keys, suggest_key
from common.core.errors import UserError
from configs.shared import TRAINING_KEYS, Experiment


class CheckedConfig(Protocol):
    """A config dataclass that checks which of its values do not fit together."""

    def check(self) -> None: ...


T = TypeVar("T", bound=Experiment)
S = TypeVar("S", bound=CheckedConfig)
ROOT = Path(__file__).resolve().parents[2]
# keys that data position, model, optimizer state or measurements of a run depend on, and the place of its W&B run
FIXED = (
    "seed",
    "batch",
    "accumulate",
    "start",
    "dtype",
    *("ops", "dtypes", "sizes", "algorithms", "transports"),
    "optim.name",
    *(f"data.{n}" for n in ("name", "train_limit", "image_size", "samples")),
    *("wandb.project", "wandb.entity"),
)
RANKS_PER_NODE = "processes_per_node"  # key of the number of ranks, where the settings of stages do not give it
LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # libyaml's is eight times as fast
USAGE = "[--help] [--print-config] [--config FILE | --resume RUN_FOLDER] [key=value ...]"


def flatten_mapping(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten_mapping(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def describe_yaml_position(error: yaml.YAMLError) -> str:
    """Return the position of a YAML error in words; empty if it is not known."""
    mark = getattr(error, "problem_mark", None)
    return f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file by dotted name, all scalars as text. Raises UserError."""
    try:
        tree = yaml.load(path.read_text(), Loader=LOADER)  # noqa: S506 (it builds only str, list, dict)
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML{describe_yaml_position(error)}") from None
    if not isinstance(tree or {}, dict):
        raise UserError(f"{path}: expected `key: value` lines")
    return flatten_mapping(tree or {})


def build_config(schema: type[S], layers: Sequence[Mapping[str, Any]]) -> S:
    """Merge layers of values as text, later ones winning, into a checked config. Raises UserError."""
    known = list_keys(schema)
    config = OmegaConf.structured(schema)
    for layer in layers:
        for given, text in layer.items():
            name = f"{given}.on" if f"{given}.on" in known else given  # a group that is switched on by its name
            group = [key for key in known if key.startswith(f"{name}.")]
            if group:
                raise UserError(f"{name} is a group of settings: {', '.join(group)}")
            if name not in known:
                raise UserError(f"unknown key {name}; {suggest_key(name, known)}")
            OmegaConf.update(config, name, parse_value(known[name], text))
    settings = typing.cast(S, OmegaConf.to_object(config))
    try:
        settings.check()
    except ValueError as error:
        raise UserError(str(error)) from None
    refuse_unused_keys(known.values(), settings)
    return settings


@dataclasses.dataclass(frozen=True)
class StartedRanks:
    """Number of the ranks that another launcher has started, and of their hosts."""

    ranks: int
    nodes: int


def build_config_of_started(
    schema: type[T], layers: list[Mapping[str, Any]], given: Mapping[str, Any], started: StartedRanks | None
) -> T:
    """Build a config for the number of ranks that were started, as far as the `given` values leave it open.

    Raises UserError.
    """
    is_open = str(given.get(RANKS_PER_NODE, "0")) == "0" and RANKS_PER_NODE in list_keys(schema)
    if started is None or not is_open:
        return build_config(schema, layers)
    with contextlib.suppress(UserError):  # such as a batch that two ranks cannot share, where three were started
        settings = build_config(schema, layers)
        if settings.processes == started.ranks:
            return settings
    nodes = str(given.get("launch.nodes", started.nodes))
    count = started.ranks // int(nodes) if nodes.isdecimal() and int(nodes) else 0
    return build_config(schema, [*layers, {RANKS_PER_NODE: str(count), "launch.nodes": nodes}])


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Options and values of a command line, before any value is converted."""

    help: bool
    print_config: bool
    file: Path | None
    resume: Path | None
    values: dict[str, str]


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Split a command line into options and key=value pairs. Raises UserError."""
    rest, values = list(arguments), dict[str, str]()
    show_help = print_config = False
    paths: dict[str, Path] = {}
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h"):
            show_help = True
        elif word == "--print-config":
            print_config = True
        elif word.partition("=")[0] in ("--config", "--resume"):
            option, _, value = word.partition("=")
            value = value or (rest.pop(0) if rest else "")
            if not value:
                what = (
                    "file, such as runs/<id>/config.yaml" if option == "--config" else "run folder, such as runs/<id>"
                )
                raise UserError(f"{option} needs a {what}")
            paths[option] = Path(value)
        elif word.startswith("-") or "=" not in word:
            raise UserError(
                f"argument {word!r} not understood; write key=value, without blanks and dashes; usage: {USAGE}"
            )
        else:
            name, _, text = word.partition("=")
            if not text.isprintable():
                raise UserError(f"{name}={text!r}: line breaks and control characters are not allowed")
            values[name] = text
    return CommandLine(show_help, print_config, paths.get("--config"), paths.get("--resume"), values)


def import_schema(name: str) -> type[Experiment]:
    """Import the Config dataclass of an experiment by name."""
    return importlib.import_module(f"configs.{name}").Config


def list_experiments() -> list[str]:
    """Return the names of all experiments: those with a script, a config class and a YAML file."""
    found = (path.stem for path in (ROOT / "configs").glob("*.yaml"))
    return sorted(name for name in found if (ROOT / "experiments" / f"{name}.py").exists())


def get_experiment_name(schema: type[Experiment]) -> str:
    """Return the name of the experiment that a Config dataclass belongs to."""
    return schema.__module__.rpartition(".")[2]


def print_text(text: str) -> None:
    """Print a text, also into a pipe whose reader has ended, as that of `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit


def load_config(
    schema: type[T],
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    started: StartedRanks | None = None,
) -> T:
    """Return the config of one run; print and exit for --help and --print-config.

    Where ranks have been `started` already, their number is that of the run, unless the user gives one.
    Raises UserError for anything wrong, before any rank starts and any data is touched.
    """
    name = get_experiment_name(schema)
    line = parse_command_line(arguments)
    if line.help:
        print_text(format_help(schema))
        sys.exit(0)
    file = line.file or ROOT / "configs" / f"{name}.yaml"
    if line.resume:
        file = line.resume / "config.yaml"
        if not file.is_file():
            raise UserError(f"--resume {line.resume}: no run folder, it has no config.yaml; make status lists the runs")
        if not read_config_file(file):
            raise UserError(f"{file} is empty; bring it back, or start a new run")
        other = line.resume.absolute().name.rsplit("-", 3)[0]
        if other != name:
            raise UserError(f"--resume {line.resume} is a run of {other}, not of {name}")
        known = read_config_file(file)
        fixed = [key for key in FIXED if str(line.values.get(key, known.get(key))) != str(known.get(key))]
        if fixed:
            raise UserError(
                f"{fixed[0]} cannot change when a run goes on: it was {known.get(fixed[0])}; leave it out, or "
                "start a new run"
            )
    elif line.file and (changed := read_changes_of_attempts(line.file.parent)):
        raise UserError(
            f"{line.file} holds the first settings of the run; it was resumed with {describe_changes(changed)}, and no "
            "single run repeats that; to train with the first settings alone, copy the file elsewhere"
        )
    surroundings = {"data.root": environ["DATA_ROOT"]} if environ.get("DATA_ROOT") else {}
    resumed = {name: now for name, (_, now) in read_last_changes(line.resume).items()} if line.resume else {}
    own = read_config_file(file)
    given = (own if line.file or line.resume else {}) | resumed | line.values
    settings = build_config_of_started(schema, [surroundings, own, resumed, line.values], given, started)
    if line.print_config:
        print_text(format_yaml(settings).rstrip("\n"))
        sys.exit(0)
    return settings


def format_yaml(settings: Experiment) -> str:
    """Return the resolved config as YAML; a run can be repeated from this text alone."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def format_known_yaml(settings: Experiment, file: Path) -> str:
    """Return the config as YAML, without the keys that a run's own `file` lacks: they came after its source."""
    tree, values = OmegaConf.create(), OmegaConf.to_container(OmegaConf.structured(settings))
    assert isinstance(values, dict)
    known = read_config_file(file)
    for name, value in flatten_mapping({str(key): value for key, value in values.items()}).items():
        if name in known:
            OmegaConf.update(tree, name, value)
    return OmegaConf.to_yaml(tree)


Changes = dict[str, tuple[Any, Any]]  # old and new value by dotted name, as text or lists of texts
CHANGED = "changed.json"  # in an attempt with other values than config.yaml


def find_changes(file: Path, settings: Experiment) -> Changes:
    """Return the values that change training or tracking and differ from a YAML file."""
    then, now = read_config_file(file), flatten_mapping(yaml.load(format_yaml(settings), Loader=yaml.BaseLoader))  # noqa: S506 (as above)
    kept = [name for name in now if not name.startswith(("runs", "launch.", "log.", "checkpoint."))]
    kept = [name for name in kept if name not in ("data.root", "data.cache") and name in then]
    return {name: (then[name], now[name]) for name in kept if then[name] != now[name]}


def describe_changes(changed: Changes) -> str:
    """Return changed values in words, as in `stages 2 -> 1`."""
    return ", ".join(f"{name} {then} -> {now}" for name, (then, now) in changed.items())


def read_last_changes(run: Path) -> Changes:
    """Return the values in which a run's newest attempt differs from config.yaml."""
    starts = sorted(path for path in run.glob("attempts/[0-9]*") if path.name.isdecimal())
    return read_changes(starts[-1] / CHANGED) if starts else {}


def read_changes_of_attempts(run: Path) -> Changes:
    """Return the values that change training and in which any attempt of a run differs from config.yaml."""
    found: Changes = {}
    for path in sorted(run.glob(f"attempts/[0-9]*/{CHANGED}")):
        found |= read_changes(path)
    return {name: pair for name, pair in found.items() if not name.startswith("wandb.")}


def is_setting_text(value: Any) -> bool:
    """Check for a value as text, or a list of texts."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def read_changes(path: Path) -> Changes:
    """Return the changed values in a file; none where it is missing. Raises UserError for a damaged one."""
    try:
        found = {name: (then, now) for name, (then, now) in json.loads(path.read_text()).items()}
        if not all(map(is_setting_text, itertools.chain.from_iterable(found.values()))):
            raise ValueError
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        problem = f"{path} is damaged: the settings of that attempt are not known"
        raise UserError(f"{problem}; bring the file back, or delete it to go on with those of config.yaml") from None


def format_help(schema: type[Experiment]) -> str:
    """Return the help text: every key that has a meaning, with its default, type or range, and documentation."""
    name = get_experiment_name(schema)
    values = read_config_file(ROOT / "configs" / f"{name}.yaml")
    lines = [f"usage: python experiments/{name}.py {USAGE}", f"       make exp NAME={name} ARGS='key=value ...'", ""]
    for key in list_keys(schema).values():
        if not schema.trains and key.name.partition(".")[0] in TRAINING_KEYS:
            continue
        default = parse_value(key, values[key.name]) if key.name in values else key.default
        shown = str(default).lower() if isinstance(default, bool) else default
        shown = f"[{','.join(shown)}]" if isinstance(shown, list) else shown
        lines.append(f"  {key.name}={shown}  ({key.allowed})")
        lines += textwrap.wrap(" ".join(key.doc.split()), 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
