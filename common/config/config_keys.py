"""Keys of a config dataclass with their types, ranges and documentation, and conversion of text to values.

The keys of a group of settings begin with the name of the group, such as `optim.lr`. The keys of a group that is
declared with `configs.fields.flat` have no prefix, so the path of an attribute may differ from its key.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import operator
import os
import re
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.system.errors import UserError
from configs.shared import Experiment, TrainingExperiment
from configs.strategies import Refusal

S = TypeVar("S")
MAX_SHOWN_LENGTH = 100  # maximum number of characters of an invalid value in an error message
SYNONYMS = {
    "accumulation_steps": "accumulate",
    "batch_size": "batch",
    "dataset": "data.name",
    "grad_clip": "clip",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "optim.lr",
    "lr_scheduler": "optim.decay",
    "max_epochs": "epochs",
    "max_grad_norm": "clip",
    "max_steps": "steps",
    "nnodes": "launch.nodes",
    "nproc_per_node": "processes_per_node",
    "num_epochs": "epochs",
    "num_workers": "data.workers",
    "optimizer": "optim.name",
    "scheduler": "optim.decay",
    "wd": "optim.weight_decay",
    "world_size": "processes_per_node",
}
"""Keys of this project by the names that other programs use for the same settings."""


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """One key of a config: its dotted name, attribute, type and default, and the class that declares it."""

    name: str
    path: str
    """Attribute of the config that contains the value, such as `optim.lr` or `sharding.shards`."""
    type: Any
    default: Any
    owner: type
    """The dataclass that declares this field."""
    metadata: Mapping[str, Any]
    """Metadata of the field; see configs/fields.py."""

    @property
    def low(self) -> float | None:
        """Smallest valid number, or None if there is no limit."""
        return self.metadata.get("low")

    @property
    def high(self) -> float | None:
        """Largest valid number, or None if there is no limit."""
        return self.metadata.get("high")

    @property
    def choices(self) -> tuple[Any, ...]:
        """Valid values, or an empty tuple if there is no list of values."""
        return typing.get_args(self.type) if self.is_literal else self.metadata.get("choices", ())

    @property
    def is_literal(self) -> bool:
        """True if only the values in `choices` are valid; otherwise, a value may also be `FILE.py:name`."""
        return typing.get_origin(self.type) is typing.Literal

    @property
    def only(self) -> str:
        """Another setting that this key requires, such as `mode=bounded`, or an empty string."""
        return str(self.metadata.get("only", ""))

    @property
    def chosen_from(self) -> tuple[str, ...]:
        """Settings on which the automatic choice of this setting depends."""
        return tuple(self.metadata.get("chosen_from", ()))

    def get_value(self, settings: object) -> Any:
        """Return the value of this key in a config."""
        value = operator.attrgetter(self.path)(settings)
        return float(value) if self.type is float else value  # the default of a float may be an int

    @property
    def doc(self) -> str:
        """Documentation of the field, read from the source code."""
        return read_field_docs(self.owner).get(self.name.rpartition(".")[2], "")

    @property
    def allowed(self) -> str:
        """Description of the type and range, such as `int >= 1`."""
        if self.choices:
            return " | ".join(map(str, self.choices))
        name = "list" if self.type == list[str] else self.type.__name__
        if self.high is not None:
            return f"{name} from {self.low} to {self.high}"
        return f"{name} >= {self.low}" if self.low is not None else name


@functools.cache
def resolve_field_types(schema: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields. Their annotations are text, which takes long to evaluate."""
    return typing.get_type_hints(schema)


def list_keys(schema: type, prefix: str = "", parent: str = "") -> dict[str, ConfigKey]:
    """Return all keys of a dataclass and its groups, by dotted name.

    For a group, `prefix` is the prefix of its keys, and `parent` is the prefix of its attributes.
    """
    types = resolve_field_types(schema)
    keys: dict[str, ConfigKey] = {}
    for field in dataclasses.fields(schema):
        field_type = types[field.name]
        name = prefix + field.name
        path = parent + field.name
        if dataclasses.is_dataclass(field_type):
            group_prefix = prefix if field.metadata.get("is_flat") else f"{name}."
            keys |= list_keys(typing.cast(type, field_type), group_prefix, f"{path}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        keys[name] = ConfigKey(name, path, field_type, default, schema, field.metadata)
    return keys


def read_values(settings: object) -> dict[str, Any]:
    """Return the value of each key of a config, by dotted name."""
    return {key.name: key.get_value(settings) for key in list_keys(type(settings)).values()}


def nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts of values by dotted name, as in config.yaml."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last_part = name.split(".")
        group = tree
        for group_name in groups:
            group = group.setdefault(group_name, {})
        group[last_part] = value
    return tree


def replace_values(settings: S, values: Mapping[str, Any]) -> S:
    """Return a copy of a config in which the values of some keys are replaced."""
    keys = list_keys(type(settings))
    changed: S = replace_attributes(settings, {keys[name].path: value for name, value in values.items()})
    return changed


def replace_attributes(group: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass in which the attributes with the given dotted paths are replaced."""
    fields: dict[str, Any] = {}
    subgroups: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, path_in_subgroup = path.partition(".")
        if path_in_subgroup:
            subgroups.setdefault(name, {})[path_in_subgroup] = value
        else:
            fields[name] = value
    for name, subgroup_values in subgroups.items():
        fields[name] = replace_attributes(getattr(group, name), subgroup_values)
    return dataclasses.replace(group, **fields)


@functools.cache
def read_field_docs(schema: type) -> dict[str, str]:
    """Return the documentation strings below the fields of a dataclass and its base classes, by field name."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for node, next_node in itertools.pairwise(body):
            match node, next_node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    docs[name] = str(text)
    return docs


def parse_value(key: ConfigKey, text: Any) -> Any:
    """Convert text to the type of its key. Raises UserError that states the key, the text and the allowed values."""
    try:
        return convert_value(key, text)
    except ValueError as error:
        rejected_text = format_value(text)[:MAX_SHOWN_LENGTH]
        if not rejected_text.isprintable():
            rejected_text = repr(rejected_text)
        raise UserError(f"{key.name}={rejected_text}: {error}; allowed: {key.allowed}") from None


def format_value(value: Any) -> str:
    """Return a value as text, as on the command line, such as `true` or `[a,b]`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def describe_missing_name(text: str) -> str:
    """Return why a value that is not `FILE.py:name` is invalid. If it is a file, list the names that it defines."""
    if not (text.endswith(".py") and Path(text).is_file()):
        return "invalid value"
    with contextlib.suppress(SyntaxError, ValueError, OSError):
        body = ast.parse(Path(text).read_bytes()).body
        names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        if names:
            return f"the name after the file is missing; the file has {', '.join(names)}"
    return "the name after the file is missing"


def convert_value(key: ConfigKey, text: Any) -> Any:
    """Convert text to the type of its key. Raises ValueError if the text is invalid."""
    if key.type == list[str]:
        elements = text if isinstance(text, list) else parse_list(text)
        if elements is None or not all(isinstance(element, str) for element in elements):
            raise ValueError("expected a list such as [a,b]")
        reject_interpolations(elements)
        return elements
    if not isinstance(text, str):
        raise ValueError("expected a single value, not a group of keys")
    reject_interpolations([text])
    if key.choices:
        is_file = ":" in text and not key.is_literal
        if text not in key.choices and not is_file:
            raise ValueError("invalid value" if key.is_literal else describe_missing_name(text))
        return expand_home(text) if is_file else text
    if key.type is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    if key.type in (int, float):
        number = parse_number(key.type, text)
        if number is None:
            raise ValueError("expected an integer" if key.type is int else "expected a decimal number")
        is_too_low = key.low is not None and number < key.low
        is_too_high = key.high is not None and number > key.high
        if is_too_low or is_too_high:
            raise ValueError("out of range")
        return number
    if "check_text" in key.metadata:
        key.metadata["check_text"](text)
    is_path = key.metadata.get("is_path") or ".py:" in text  # FILE.py:name
    return expand_home(text) if is_path else text


def reject_interpolations(texts: Sequence[str]) -> None:
    """Raise ValueError if a text contains `${`, which config.yaml would not preserve."""
    if any("${" in text for text in texts):
        raise ValueError("interpolations are not allowed")


def expand_home(path: str) -> str:
    """Replace `~` or `~user` at the beginning of a path by the home folder. An unknown user remains unchanged."""
    return os.path.expanduser(path)  # noqa: PTH111 (pathlib raises an error for unknown users)


def has_same_value(key: ConfigKey, first: Any, second: Any) -> bool:
    """Return whether two texts of a key have the same value. Relative and absolute paths of a file are the same.

    Raises UserError if a text is invalid. The text of a list may also be a list of strings.
    """
    first_value = parse_value(key, first)
    second_value = parse_value(key, second)
    if key.metadata.get("is_path"):
        return os.path.abspath(first_value) == os.path.abspath(second_value)  # noqa: PTH100
    return bool(first_value == second_value)


def reject_unused_keys(settings: object) -> None:
    """Raise UserError if a key differs from its default but has no effect with the other settings."""
    keys = list_keys(type(settings))
    trains_model = isinstance(settings, TrainingExperiment)
    for key in keys.values():
        value = key.get_value(settings)
        if key.metadata.get("needs_model") and value != key.default and not trains_model:
            problem = f"{key.name}={value} has no effect, because this experiment trains no model"
            raise UserError(f"{problem}; use {key.name}={key.default}")
        other_key, _, needed_value = key.only.partition("=")
        if key.only and value != key.default and keys[other_key].get_value(settings) != needed_value:
            problem = f"{key.name}={format_value(value)} needs {key.only}"
            raise UserError(f"{problem}; set {key.only} or use {key.name}={format_value(key.default)}")


def check_combinations(settings: object, **equivalents: Any) -> None:
    """Raise ValueError for settings that the config refuses to combine. The message includes a remedy.

    In the conditions, `equivalents` replace values of settings, for example the value of a custom function by a
    built-in value with the same property. The message contains the values of the settings.
    """
    refusals: Sequence[Refusal] = getattr(settings, "refused", ())
    values = read_values(settings) if refusals else {}
    for refusal in refusals:
        if refusal.applies(values | equivalents):
            raise ValueError(refusal.format_message(values))


def list_training_keys(schema: type) -> set[str]:
    """Return the keys for training that a pure measurement lacks. The set is empty for any other config."""
    if not issubclass(schema, Experiment):
        return set()
    return list_keys(TrainingExperiment).keys() - list_keys(schema).keys()


def drop_training_keys(schema: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted name, for a pure measurement without the settings for training.

    Older versions wrote these settings to the config.yaml of a measurement, where they had no effect.
    """
    ignored = list_training_keys(schema)
    return {name: value for name, value in values.items() if name not in ignored}


def suggest_key(name: str, schema: type) -> str:
    """Return a remedy for a key that a config does not have."""
    keys = list_keys(schema)
    if name.partition(".")[0] == "elastic" and not any(key.startswith("elastic.") for key in keys):
        problem = "this experiment cannot continue after losing a rank"
        return f"{problem}. Omit this key; the experiment resumes from its last checkpoint"
    training_keys = list_training_keys(schema)
    suggestion = find_similar_key(name, keys.keys() | training_keys)
    if suggestion in training_keys:
        return "this experiment trains no model and has no settings for training; omit this key"
    return f"did you mean {suggestion}?" if suggestion else "list all keys with --help"


def find_similar_key(name: str, keys: Collection[str]) -> str:
    """Return the key that a user most likely means by `name`, or an empty string."""
    last_part = name.rpartition(".")[2]
    suggestion = SYNONYMS.get(last_part.lower(), "")
    if name in keys or suggestion in keys:
        return name if name in keys else suggestion
    same_last_part = [key for key in keys if key.rpartition(".")[2] == last_part]
    similar = difflib.get_close_matches(name, sorted(keys), n=1, cutoff=0.5)
    candidates = same_last_part if len(same_last_part) == 1 else similar
    return candidates[0] if candidates else ""


def parse_number(number_type: type, text: str) -> int | float | None:
    """Parse a decimal integer of at most 18 digits or a finite float.

    Returns None for any other text, such as octal numbers, sexagesimal numbers, or numbers with underscores.
    """
    if number_type is int:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return None
    return float(text) if math.isfinite(float(text)) else None


def parse_list(text: str) -> list[str] | None:
    """Parse `[a,b]`, `a,b` or `[]` as a list of strings. Return None for nested brackets."""
    has_brackets = text.startswith("[") and text.endswith("]")
    inner = text[1:-1] if has_brackets else text
    if not set("[]{}").isdisjoint(inner):
        return None
    return [element.strip() for element in inner.split(",")] if inner.strip() else []
