"""Tables of an experiment: the strategies that it can divide among ranks, and the pairs of settings that it refuses.

An experiment lists its strategies as degrees of parallelism. `make sweep GRID=configs/sweeps/strategies.py` runs all
that its checks accept. Settings that cannot be combined are listed as a `Refusal`, which names the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from configs.batch_plan import list_divisors

Settings = Mapping[str, str]
"""Values of settings as on the command line, by dotted name."""
CONDITION = re.compile(r"([\w.]+?)(!=|=|>)(.*)")
PLACEHOLDER = re.compile(r"\{([\w.]+)\}")
RANKS_PER_HOST = "processes_per_node"
"""Name of the degree that counts the ranks of one host instead of all ranks."""


def format_text(value: Any) -> str:
    """Return a value as text, as in conditions and messages: `true`, `0.2`, or `auto` for a list with this element."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Condition:
    """A condition on the value of a setting, such as `model!=gpt`, `sequence=true` or `tensor>1`."""

    setting: str
    operator: str
    operand: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition in a text. Raises ValueError if the text is not a condition."""
        match = CONDITION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a condition such as tensor>1, sequence=true or model!=gpt")
        return cls(*match.groups())

    def holds(self, value: Any) -> bool:
        """Return whether the condition holds for a value of the setting."""
        if self.operator == ">":
            return float(value) > float(self.operand)
        return (format_text(value) == self.operand) == (self.operator == "=")


@dataclass(frozen=True)
class Refusal:
    """Conditions that the settings of a run must not meet together: two, or three if `third` is set."""

    first: str
    """Condition on one setting, such as `sequence=true`."""
    second: str
    """Condition on another setting, such as `tensor=1`."""
    problem: str
    """Reason of the refusal. `{model}` stands for the value of the setting `model`."""
    remedy: str
    """What the user can do instead, with the same placeholders. Each change that it names makes the settings valid."""
    third: str = ""
    """Condition without which one of the settings has no effect, such as `stages>1`."""

    @property
    def conditions(self) -> list[Condition]:
        return [Condition.parse(text) for text in (self.first, self.second, self.third) if text]

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Return whether settings, given by dotted name, meet all conditions."""
        return all(condition.holds(values[condition.setting]) for condition in self.conditions)

    def format_message(self, values: Mapping[str, Any]) -> str:
        """Return the problem and the remedy for the settings of a run."""
        return PLACEHOLDER.sub(lambda match: format_text(values[match[1]]), f"{self.problem}; {self.remedy}")


@dataclass(frozen=True)
class Strategies:
    """Strategies of an experiment, as degrees of parallelism whose product is the number of ranks."""

    degrees: Mapping[str, Sequence[Settings]]
    """Setting of each degree, and the variants that are available if the degree is greater than 1. The first variant is
    the default. If a variant sets `<degree>_per_process`, such as `stages_per_process`, each rank holds this number of
    parts, and the degree is multiplied by it."""
    undivided: Mapping[str, Settings] = field(default_factory=dict)
    """Settings that apply if a degree is 1, by the name of the degree."""
    options: Sequence[Settings] = ({},)
    """Settings that apply to any number of ranks. The first entry is the default."""
    run: Settings = field(default_factory=dict)
    """Settings of the short runs that compare the strategies."""

    def list_candidates(self, ranks: int, nodes: int = 1) -> list[dict[str, str]]:
        """Return the settings of each strategy for `ranks` ranks on `nodes` hosts. Some may be refused by the checks.

        A strategy that combines degrees has the default variants and option. Any other strategy deviates in at most one
        of them. The list therefore stays short.
        """
        candidates = []
        for counts in factorize(ranks, len(self.degrees)):
            degrees = dict(zip(self.degrees, counts, strict=True))
            choices: list[Sequence[Settings]] = []
            for name, count in degrees.items():
                choices.append(self.degrees[name] if count > 1 else (self.undivided.get(name, {}),))
            choices.append(self.options)
            is_combined = sum(count > 1 for count in counts) > 1
            if is_combined:
                choices = [entries[:1] for entries in choices]
            for variants in select_one_deviation(choices):
                chosen: dict[str, str] = {}
                for variant in variants:
                    chosen |= variant
                settings = {name: format_degree(name, count, chosen, nodes) for name, count in degrees.items()}
                candidates.append(settings | chosen)
        return candidates

    @property
    def varied_settings(self) -> set[str]:
        """Names of all settings in which the strategies differ."""
        names = set(self.degrees)
        for variants in (*self.degrees.values(), self.undivided.values(), self.options):
            for variant in variants:
                names |= variant.keys()
        return names

    def format_label(self, settings: Settings) -> str:
        """Return the label of a strategy, such as `fsdp=2 tensor=2 sequence=true`: without degrees of 1."""
        degrees = [f"{name}={settings[name]}" for name in self.degrees if settings[name] != "1"]
        varied = self.varied_settings - self.degrees.keys()
        others = [f"{name}={value}" for name, value in settings.items() if name in varied]
        return " ".join([*(degrees or ["one process"]), *others])


def format_degree(name: str, count: int, variant: Settings, nodes: int) -> str:
    """Return the value of the setting of a degree."""
    if name == RANKS_PER_HOST:
        return str(max(1, count // nodes))
    return str(count * int(variant.get(f"{name}_per_process", "1")) if count > 1 else count)


def factorize(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a positive number as an ordered product of this number of factors.

    The first factors are as large as possible first.
    """
    if factors == 1:
        yield (number,)
        return
    for first in reversed(list_divisors(number)):
        for others in factorize(number // first, factors - 1):
            yield (first, *others)


def select_one_deviation(choices: Sequence[Sequence[Settings]]) -> Iterator[tuple[Settings, ...]]:
    """Yield one entry of each sequence: first entries only, or one other entry among first entries."""
    defaults = tuple(entries[0] for entries in choices)
    yield defaults
    for position, entries in enumerate(choices):
        for entry in entries[1:]:
            yield (*defaults[:position], entry, *defaults[position + 1 :])


class Tables:
    """The tables of an experiment, as class attributes of its config."""

    strategies: ClassVar[Strategies | None] = None
    """Strategies that `make sweep GRID=configs/sweeps/strategies.py` compares; None if there is no choice."""
    refused: ClassVar[tuple[Refusal, ...]] = ()
    """Settings that cannot be combined."""
