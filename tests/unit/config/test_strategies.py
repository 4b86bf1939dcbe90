"""Tables of an experiment: refused settings name a remedy that works, and all other pairs build a config."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from common.config import config, config_keys
from common.system.errors import UserError
from configs.pipeline import V_SCHEDULES
from configs.strategies import Condition, Refusal, Settings, Strategies, factorize, format_text
from configs.sweeps.strategies import list_points
from tests.harness.environment.randomness import draw_cases

SCHEMAS = {name: config.import_schema(name) for name in config.list_experiments()}
WITH_REFUSALS = [name for name, schema in SCHEMAS.items() if schema.refused]
WITH_STRATEGIES = [name for name, schema in SCHEMAS.items() if schema.strategies is not None]
FOUR_STAGES = {"stages": "4", "stages_per_process": "2"}
"""Stages that all schedules support."""
BASE_SETTINGS = {
    "ddp_multinode": {"model": "resnet18"},
    "resnet_dataparallel": {"model": "resnet18"},
    "resnet_modelparallel": FOUR_STAGES,
}
"""Settings with which each setting of the table can have each of its values."""
DRAWN_PAIRS = 30
PAIRS_OF_OTHER_CHECKS = {
    frozenset({"elastic.on", "launch.mixed"}),
    frozenset({"elastic.on", "shards"}),
    frozenset({"stages", "schedule"}),
    frozenset({"zero1", "processes_per_node"}),
}
"""Pairs that other checks refuse: of a group that several experiments have, or together with a third setting."""


def list_values(name: str, condition: Condition) -> tuple[str, str]:
    """Return a value of a setting that meets a condition, and one that does not."""
    key = config_keys.list_keys(SCHEMAS[name])[condition.setting]
    if condition.operator == ">":
        larger = float(condition.operand) + 0.5 if key.type is float else int(condition.operand) + 1
        return str(larger), condition.operand
    if key.type is bool:
        values = ["true", "false"]
    elif key.type is int:
        values = [str(int(condition.operand) + 1)]
    elif key.choices:
        values = [str(choice) for choice in key.choices]
    else:
        base_value = read_base_values(name)[condition.setting]
        values = [format_text(base_value), "equal"]
    other = next(value for value in values if value != condition.operand)
    return (condition.operand, other) if condition.operator == "=" else (other, condition.operand)


def load(name: str, settings: Mapping[str, str]) -> Any:
    merged = {**BASE_SETTINGS.get(name, {}), **settings}
    return load_exactly(name, merged)


def load_exactly(name: str, settings: Mapping[str, str]) -> Any:
    """Load a config without the base settings."""
    arguments = [f"{key}={value}" for key, value in settings.items()]
    return config.load_config(SCHEMAS[name], arguments, {})


def list_refusals() -> Iterator[tuple[str, Refusal]]:
    for name in WITH_REFUSALS:
        for refusal in SCHEMAS[name].refused:
            yield name, refusal


def make_refused_settings(name: str, refusal: Refusal) -> dict[str, str]:
    """Return settings that meet all conditions of a refusal."""
    settings = {condition.setting: choose_met_value(name, condition) for condition in refusal.conditions}
    if "stages" in settings and settings.get("schedule") in V_SCHEDULES:
        settings |= FOUR_STAGES | {"accumulate": "4"}
    return settings


def choose_met_value(name: str, condition: Condition) -> str:
    if condition.setting == "model" and condition.operator == "!=":
        return "net.py:Net"
    met, _ = list_values(name, condition)
    return met


@pytest.mark.parametrize("name, refusal", list(list_refusals()), ids=str)
def test_every_refusal_of_a_table_names_the_remedy(name: str, refusal: Refusal) -> None:
    settings = make_refused_settings(name, refusal)
    with pytest.raises(UserError) as refused:
        load(name, settings)
    message = str(refused.value)
    assert message == refusal.format_message(settings)
    assert refusal.problem and refusal.remedy
    groups = [condition.setting.partition(".")[0] for condition in refusal.conditions]
    assert any(group in message for group in groups)
    remedied = apply_remedies(message, settings)
    assert remedied
    for changed in remedied:
        load(name, changed)


def apply_remedies(message: str, settings: Mapping[str, str]) -> list[dict[str, str]]:
    """Return settings after each change that a message suggests, such as `omit reshard` or `set fsdp=2`."""
    remedy = message.rpartition("; ")[2]
    changed = []
    for name in re.findall(r"omit ([\w.]+)", remedy):
        assert name in settings
        changed.append({key: value for key, value in settings.items() if key != name})
    for name, value in re.findall(r"(?<!omit )\b([\w.]+)=(\[[\d,]+\]|\w+)", remedy):
        changed.append({**settings, name: value})
    return changed


def list_levels(name: str) -> dict[str, list[str]]:
    """Return the values of each setting of a table that its conditions distinguish."""
    levels: dict[str, dict[str, None]] = {}
    for refusal in SCHEMAS[name].refused:
        for condition in refusal.conditions:
            values = levels.setdefault(condition.setting, {})
            met = choose_met_value(name, condition)
            _, other = list_values(name, condition)
            values |= dict.fromkeys((met, other))
    return {setting: list(values) for setting, values in levels.items()}


@functools.cache
def read_base_values(name: str) -> dict[str, Any]:
    return config_keys.read_values(load(name, {}))


def predict_message(name: str, settings: Mapping[str, str]) -> str:
    """Return the message with which the table refuses settings, or an empty string."""
    values = read_base_values(name) | config.parse_values(SCHEMAS[name], settings)
    for refusal in SCHEMAS[name].refused:
        if refusal.applies(values):
            return refusal.format_message(values)
    return ""


def list_pairs(name: str) -> list[dict[str, str]]:
    """Return each combination of the values of two settings of a table."""
    pairs = []
    levels = list_levels(name)
    for first, second in itertools.combinations(levels, 2):
        if {first, second} not in PAIRS_OF_OTHER_CHECKS:
            for values in itertools.product(levels[first], levels[second]):
                pairs.append(dict(zip((first, second), values, strict=True)))
    return pairs


@pytest.mark.parametrize("name", WITH_REFUSALS)
def test_a_pair_of_settings_is_refused_exactly_if_the_table_says_so(name: str) -> None:
    for settings in draw_cases(f"pairs-{name}", list_pairs(name), DRAWN_PAIRS):
        message = predict_message(name, settings)
        if not message:
            load(name, settings)
        else:
            with pytest.raises(UserError) as refused:
                load(name, settings)
            assert str(refused.value) == message


@pytest.mark.parametrize(
    "name, ranks", draw_cases("strategies by ranks", [*itertools.product(WITH_STRATEGIES, [1, 2, 4])], 4)
)
def test_every_strategy_has_the_requested_number_of_ranks(name: str, ranks: int) -> None:
    """With the settings of the sweep, no strategy is refused. All labels and all configs differ."""
    strategies = SCHEMAS[name].strategies
    assert strategies is not None
    points = list_points(strategies, ranks)
    configs = [load_exactly(name, {**strategies.run, **point}) for point in points]
    processes = [cfg.processes for cfg in configs]
    singles = len(strategies.list_candidates(1))
    assert set(processes[:singles]) == {1}
    assert set(processes[singles:]) <= {ranks}
    labels = set(map(strategies.format_label, points))
    texts = set(map(config.format_yaml, configs))
    assert len(labels) == len(texts) == len(points)
    assert ranks == 1 or strategies.varied_settings == set().union(*points)


def test_ranks_per_host_are_divided_by_the_hosts() -> None:
    strategies = Strategies({"processes_per_node": ({"strategy": "ddp"},)})
    single, divided = list_points(strategies, 4, nodes=2)
    assert single == {"processes_per_node": "1", "launch.nodes": "1"}
    assert divided == {"processes_per_node": "2", "strategy": "ddp"}


def test_a_strategy_deviates_in_one_variant_or_option() -> None:
    zbv = {"schedule": "zbv", "stages_per_process": "2"}
    degrees = {"replicas": ({},), "stages": ({}, zbv)}
    options: list[Settings] = [{}, {"recompute": "true"}]
    strategies = Strategies(degrees, undivided={"stages": {"mode": "single"}}, options=options)
    points = list_points(strategies, 2)
    labels = list(map(strategies.format_label, points))
    assert labels == [
        "one process mode=single",
        "one process mode=single recompute=true",
        "replicas=2 mode=single",
        "replicas=2 mode=single recompute=true",
        "stages=2",
        "stages=4 schedule=zbv stages_per_process=2",
        "stages=2 recompute=true",
    ]


def test_combined_degrees_have_the_default_variants() -> None:
    degrees: dict[str, list[Settings]] = {"fsdp": [{}, {"reshard": "false"}], "tensor": [{}, {"sequence": "true"}]}
    strategies = Strategies(degrees, options=[{}, {"recompute": "blocks"}])
    labels = list(map(strategies.format_label, strategies.list_candidates(4)))
    assert labels == [
        *("fsdp=4", "fsdp=4 reshard=false", "fsdp=4 recompute=blocks", "fsdp=2 tensor=2"),
        *("tensor=4", "tensor=4 sequence=true", "tensor=4 recompute=blocks"),
    ]


def test_numbers_are_factorized_in_every_order() -> None:
    assert list(factorize(4, 2)) == [(4, 1), (2, 2), (1, 4)]
    assert len(list(factorize(8, 3))) == 10


def test_a_condition_holds_for_values_of_each_type() -> None:
    values: dict[str, tuple[Any, Any]] = {}
    values["tensor>1"] = (2, 1)
    values["model!=gpt"] = ("net.py:Net", "gpt")
    values["sequence=true"] = (True, False)
    values["shards=auto"] = (["auto"], ["3", "1"])
    values["dropout>0"] = (0.2, 0.0)
    for text, (met, other) in values.items():
        condition = Condition.parse(text)
        assert condition.holds(met)
        assert not condition.holds(other)


def test_a_text_without_an_operator_is_no_condition() -> None:
    with pytest.raises(ValueError, match="'tensor' is not a condition such as tensor>1"):
        Condition.parse("tensor")
