"""Keys of a config: ranges, types, and remedies for misspelled keys and invalid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import config
from common.config.config import load_config
from common.config.config_keys import ConfigKey, list_keys, parse_value
from common.system.errors import UserError
from configs.ddp_multinode import Config as DataParallelConfig
from configs.mnist_pipeline import Config
from configs.profile import Profile
from tests.harness.commands.refusals import expect_refusal
from tests.harness.experiments.measurement_config import Measurement
from tests.unit.config.conftest import get_refusal


def list_bounded_keys() -> list[ConfigKey]:
    """Return the keys of all experiments and of the cluster profile that have a range, each range once."""
    schemas: list[type] = [Profile, *(config.import_schema(name) for name in config.list_experiments())]
    keys = {}
    for schema in schemas:
        for key in list_keys(schema).values():
            if key.low is not None:
                keys[key.name, key.low, key.high] = key
    return list(keys.values())


@pytest.mark.parametrize("key", list_bounded_keys(), ids=lambda key: key.name)
def test_bounds_are_accepted_and_numbers_beyond_are_refused(key: ConfigKey) -> None:
    for bound, direction in ((key.low, -1), (key.high, 1)):
        if bound is None:
            continue
        text = str(int(bound)) if key.type is int else str(bound)
        assert parse_value(key, text) == bound
        with pytest.raises(UserError, match="out of range"):
            parse_value(key, str(int(bound) + direction))


@pytest.mark.parametrize("text, number", [("010", 10), ("+7", 7), ("0", 0)])
def test_integers_are_decimal(text: str, number: int, tmp_path: Path) -> None:
    assert load_config(Config, [f"seed={text}"], {}).seed == number
    file = tmp_path / "c.yaml"
    file.write_text(f"seed: {text}\n")
    assert load_config(Config, ["--config", str(file)], {}).seed == number


@pytest.mark.parametrize("text", ["12:30", "1_000", "0x10", "1.0", "", "ten", "1e3"])
def test_texts_that_are_not_integers_are_refused(text: str) -> None:
    message = get_refusal(f"seed={text}")
    assert f"seed={text}" in message
    assert "int >= 0" in message


@pytest.mark.parametrize("text", ["nan", "inf", "1_0", "1e999", "x"])
def test_texts_that_are_not_finite_numbers_are_refused(text: str) -> None:
    assert "float from 0 to 100" in get_refusal(f"optim.lr={text}")


MISTAKES = {
    "stage=2": "unknown key stage ... did you mean stages",
    "lr=2": "unknown key lr ... optim.lr",
    "optim.learning_rate=2": "unknown key optim.learning_rate; did you mean optim.lr?",
    "batch_size=2": "unknown key batch_size; did you mean batch?",
    "nodes=2": "unknown key nodes; did you mean launch.nodes?",
    "data.rot=x": "unknown key data.rot ... data.root",
    "zzzz=1": "unknown key zzzz ... --help",
    "elastic.min=2": "unknown key elastic.min ... this experiment cannot continue after losing a rank",
    "batch=0": "batch=0 ... int >= 1",
    "data.fallback=cifar": "data.fallback=cifar ... digits | none",
    "data=3": "data is a group of settings; set one of its keys: data.name, data.root",
    "data.root=${oc.env:HOME}": "data.root ... interpolations",
    "split=[a,[b]]": "split ... expected a list such as [a,b]",
    "stages": "unexpected argument 'stages' ... key=value",
    "--fast": "unexpected argument '--fast' ... no spaces, no leading dashes",
    "--config": "--config requires a file",
}


@pytest.mark.parametrize("argument, message", MISTAKES.items())
def test_mistakes_are_refused_with_the_remedy(argument: str, message: str) -> None:
    with expect_refusal(message):
        load_config(Config, [argument], {})


def test_a_misspelled_key_of_elastic_is_corrected_if_the_experiment_has_these_keys() -> None:
    with pytest.raises(UserError, match=r"unknown key elastic.timeot; did you mean elastic.timeout\?"):
        load_config(DataParallelConfig, ["elastic.timeot=1"], {})


TRAINING_SETTINGS = {
    "lr=0.1": "unknown key lr; this experiment trains no model and has no settings for training; omit this key",
    "batch_size=8": "this experiment trains no model",
    "epoch=3": "this experiment trains no model",
    "size=[4]": "unknown key size; did you mean sizes?",
    "log.gradient_norm=true": "this experiment trains no model; use log.gradient_norm=auto",
    "checkpoint.best=test_loss": "this experiment trains no model; use checkpoint.best=none",
}


@pytest.mark.parametrize("argument, remedy", TRAINING_SETTINGS.items())
def test_a_measurement_refuses_settings_for_training(argument: str, remedy: str) -> None:
    key, text = argument.split("=")
    with expect_refusal(remedy):
        config.build_config(Measurement, [{key: text}])
