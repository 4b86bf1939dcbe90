"""Where the settings of an experiment are declared: in few files, without multiple inheritance."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator

import pytest

from common.config import config


def declaring_classes(schema: type) -> Iterator[type]:
    """The dataclass, its bases and its groups, as far as they declare fields."""
    for cls in schema.__mro__:
        if dataclasses.is_dataclass(cls) and cls.__annotations__:
            yield cls
    for hint in typing.get_type_hints(schema).values():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from declaring_classes(hint)


@pytest.mark.parametrize("name", config.list_experiments())
def test_a_reader_finds_all_settings_in_four_files(name: str) -> None:
    classes = list(declaring_classes(config.import_schema(name)))
    files = {str(inspect.getsourcefile(cls)) for cls in classes} | {f"configs/{name}.yaml"}
    assert len(files) <= 4, sorted(files)
    assert all(len(cls.__bases__) == 1 for cls in classes), "each class has one base"


@pytest.mark.parametrize("name", config.list_experiments())
def test_a_checked_config_cannot_change(name: str) -> None:
    settings = config.load_config(config.import_schema(name), [], {})
    groups = [getattr(settings, field.name) for field in dataclasses.fields(settings)]
    for group in [settings, *filter(dataclasses.is_dataclass, groups)]:
        attribute = dataclasses.fields(group)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group, attribute, "other")
