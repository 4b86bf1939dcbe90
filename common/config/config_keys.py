"""Keys of a config dataclass with their types, ranges and documentation, and conversion of text to values."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import operator
import re
import textwrap
import typing
from collections.abc import Collection, Iterable
from typing import Any

from common.system.errors import UserError

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
    """One key of a config, with its dotted name, type, default, range, and the class that declares it."""

    name: str
    type: Any
    default: Any
    low: float | None
    high: float | None
    owner: type
    """The dataclass that declares this field."""
    only: str = ""
    """Another setting that this key requires, such as `mode=bounded`, or an empty string."""

    @property
    def doc(self) -> str:
        """Documentation of the field, read from the source code."""
        return read_field_docs(self.owner).get(self.name.rpartition(".")[2], "")

    @property
    def allowed(self) -> str:
        """Description of the type and range, such as `int >= 1`."""
        if typing.get_origin(self.type) is typing.Literal:
            return " | ".join(str(choice) for choice in typing.get_args(self.type))
        name = "list" if self.type == list[str] else self.type.__name__
        if self.high is not None:
            return f"{name} from {self.low} to {self.high}"
        return f"{name} >= {self.low}" if self.low is not None else name


def list_keys(schema: type, prefix: str = "") -> dict[str, ConfigKey]:
    """Return all keys of a dataclass and its nested dataclasses, by dotted name."""
    types = typing.get_type_hints(schema)
    keys: dict[str, ConfigKey] = {}
    for field in dataclasses.fields(schema):
        field_type = types[field.name]
        name = prefix + field.name
        if dataclasses.is_dataclass(field_type):
            keys |= list_keys(typing.cast(type, field_type), name + ".")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        low = field.metadata.get("low")
        high = field.metadata.get("high")
        keys[name] = ConfigKey(name, field_type, default, low, high, schema, field.metadata.get("only", ""))
    return keys


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
        raise UserError(f"{key.name}={text}: {error}; allowed: {key.allowed}") from None


def convert_value(key: ConfigKey, text: Any) -> Any:
    """Convert text to the type of its key. Raises ValueError if the text is invalid."""
    if key.type == list[str]:
        elements = text if isinstance(text, list) else parse_list(text)
        if elements is None or not all(isinstance(element, str) for element in elements):
            raise ValueError("expected a list such as [a,b]")
        return elements
    if not isinstance(text, str):
        raise ValueError("expected a single value, not a group of keys")
    if "${" in text:
        raise ValueError("interpolations are not allowed")
    if typing.get_origin(key.type) is typing.Literal:
        if text not in typing.get_args(key.type):
            raise ValueError("invalid value")
        return text
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
    return text


def reject_unused_keys(keys: Iterable[ConfigKey], settings: object) -> None:
    """Raise UserError if a key differs from its default but has no effect with the other settings."""
    for key in keys:
        value = operator.attrgetter(key.name)(settings)
        other_key, _, needed_value = key.only.partition("=")
        if key.only and value != key.default and getattr(settings, other_key) != needed_value:
            raise UserError(f"{key.name}={value} needs {key.only}; set {key.only} or use {key.name}={key.default}")


def suggest_key(name: str, keys: Collection[str]) -> str:
    """Return a remedy for a key that an experiment does not have."""
    if name.partition(".")[0] == "elastic" and not any(key.startswith("elastic.") for key in keys):
        problem = "this experiment cannot continue after losing a rank"
        return f"{problem}. Omit this key; the experiment resumes from its last checkpoint"
    last_part = name.rpartition(".")[2]
    suggestion = SYNONYMS.get(last_part.lower(), "")
    if suggestion not in keys:
        same_last_part = [key for key in keys if key.rpartition(".")[2] == last_part]
        similar = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
        candidates = same_last_part if len(same_last_part) == 1 else similar
        suggestion = candidates[0] if candidates else ""
    return f"did you mean {suggestion}?" if suggestion else "list all keys with --help"


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
