"""The keys of a config dataclass: dotted name, type, range, documentation, and the conversion of text by them."""

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

from common.core.errors import UserError

OTHER_NAMES = {
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
"""Names that other programs have for keys, by the last part of the name."""


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """One key of a config: dotted name, type, default, range and where it is declared."""

    name: str
    type: Any
    default: Any
    low: float | None
    high: float | None
    owner: type
    """The dataclass that has it as a field."""
    only: str = ""
    """The setting without which it has no effect, as in `mode=bounded`; empty where there is none."""

    @property
    def doc(self) -> str:
        """Documentation, read from the source."""
        return read_field_docs(self.owner).get(self.name.rpartition(".")[2], "")

    @property
    def allowed(self) -> str:
        """Type and range in words, as in `int >= 1`."""
        if typing.get_origin(self.type) is typing.Literal:
            return " | ".join(str(choice) for choice in typing.get_args(self.type))
        name = "list" if self.type == list[str] else self.type.__name__
        if self.high is not None:
            return f"{name} from {self.low} to {self.high}"
        return f"{name} >= {self.low}" if self.low is not None else name


def list_keys(schema: type, prefix: str = "") -> dict[str, ConfigKey]:
    """Return all keys of a dataclass and the dataclasses in it, by dotted name."""
    hints = typing.get_type_hints(schema)
    found: dict[str, ConfigKey] = {}
    for field in dataclasses.fields(schema):
        kind, name = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            found |= list_keys(typing.cast(type, kind), name + ".")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        low, high = field.metadata.get("low"), field.metadata.get("high")
        found[name] = ConfigKey(name, kind, default, low, high, schema, field.metadata.get("only", ""))
    return found


@functools.cache
def read_field_docs(schema: type) -> dict[str, str]:
    """Return the string literal under each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for node, after in itertools.pairwise(body):
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    docs[name] = str(text)
    return docs


def parse_value(key: ConfigKey, text: Any) -> Any:
    """Convert the text of a value by the type of its key. Raises UserError naming key, value and what is allowed."""

    def refuse(reason: str = "") -> UserError:
        return UserError(f"{key.name}={text}: {reason or 'not a valid value'}; allowed: {key.allowed}")

    if key.type == list[str]:
        items = text if isinstance(text, list) else parse_list(text)
        if items is None or not all(isinstance(item, str) for item in items):
            raise refuse("write a list as [a,b]")
        return items
    if not isinstance(text, str):
        raise refuse("expected one value, not a group of keys")
    if "${" in text:
        raise UserError(f"{key.name}={text}: interpolations are not allowed; write the value itself")
    if typing.get_origin(key.type) is typing.Literal:
        if text not in typing.get_args(key.type):
            raise refuse()
        return text
    if key.type is bool:
        if text.lower() not in ("true", "false"):
            raise refuse("write true or false")
        return text.lower() == "true"
    if key.type in (int, float):
        value = parse_number(key.type, text)
        if value is None:
            raise refuse("write a whole number" if key.type is int else "write a decimal number")
        if (key.low is not None and value < key.low) or (key.high is not None and value > key.high):
            raise refuse("out of range")
        return value
    return text


def refuse_unused_keys(keys: Iterable[ConfigKey], settings: object) -> None:
    """Raise UserError for a key that has another value than its default, and no effect with the other settings."""
    for key in keys:
        other, _, needed = key.only.partition("=")
        value = operator.attrgetter(key.name)(settings)
        if key.only and value != key.default and getattr(settings, other) != needed:
            raise UserError(f"{key.name}={value} is a setting of {key.only}; use that, or {key.name}={key.default}")


def suggest_key(name: str, known: Collection[str]) -> str:
    """Suggest what to write for a key that an experiment does not have."""
    if name.partition(".")[0] == "elastic" and not any(key.startswith("elastic.") for key in known):
        rule = "only ddp_multinode, amp_accum and param_server go on without a lost rank"
        return f"{rule}; leave it out: other experiments resume from their last checkpoint"
    last_part = name.rpartition(".")[2]
    same_meaning = [key for key in [OTHER_NAMES.get(last_part.lower(), "")] if key in known]
    same_last_part = [key for key in known if key.rpartition(".")[2] == last_part]
    if len(same_last_part) > 1:
        same_last_part = []
    near = same_meaning or same_last_part or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "--help lists all keys"


def parse_number(kind: type, text: str) -> int | float | None:
    """Parse a decimal int of at most 18 digits or a finite float; None for octal, underscores and sexagesimal."""
    if kind is int:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return None
    return float(text) if math.isfinite(float(text)) else None


def parse_list(text: str) -> list[str] | None:
    """Parse `[a,b]`, `a,b` or `[]` as a list of strings; None for nested brackets."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if any(c in inner for c in "[]{}"):
        return None
    return [item.strip() for item in inner.split(",")] if inner.strip() else []
