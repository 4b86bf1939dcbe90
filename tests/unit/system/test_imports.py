"""Imports without garbage collection: their objects are never examined, and the collector is enabled again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from common.system.imports import import_without_garbage_collection


@pytest.fixture(autouse=True)
def enabled_collector() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_objects_of_the_imports_are_not_examined() -> None:
    with import_without_garbage_collection():
        assert not gc.isenabled()
        imported: list[list[int]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    examined = {id(value) for value in gc.get_objects()}
    assert not examined & {id(value) for value in imported}


def test_a_failed_import_enables_the_collector_and_excludes_nothing() -> None:
    gc.unfreeze()
    with pytest.raises(ImportError), import_without_garbage_collection():
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_was_disabled_stays_disabled() -> None:
    gc.disable()
    with import_without_garbage_collection():
        pass
    assert not gc.isenabled()
