"""Config classes: declared in few files, without multiple inheritance, and frozen."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator

import pytest

from common.config import config


def list_declaring_classes(schema: type) -> Iterator[type]:
    """Yield the classes that declare fields: the dataclass, its bases and its groups."""
    for base in schema.__mro__:
        if dataclasses.is_dataclass(base) and base.__annotations__:
            yield base
    for hint in typing.get_type_hints(schema).values():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from list_declaring_classes(hint)


@pytest.mark.parametrize("name", config.list_experiments())
def test_all_settings_are_declared_in_five_files(name: str) -> None:
    files = {f"configs/{name}.yaml"}
    for declaring_class in list_declaring_classes(config.import_schema(name)):
        files.add(str(inspect.getsourcefile(declaring_class)))
        assert len(declaring_class.__bases__) == 1, declaring_class
    assert len(files) <= 5, sorted(files)


@pytest.mark.parametrize("name", config.list_experiments())
def test_a_loaded_config_cannot_change(name: str) -> None:
    settings = config.load_config(config.import_schema(name), [], {})
    groups = [getattr(settings, field.name) for field in dataclasses.fields(settings)]
    for group in [settings, *filter(dataclasses.is_dataclass, groups)]:
        attribute = dataclasses.fields(group)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group, attribute, "other")
