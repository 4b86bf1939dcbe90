"""Settings whose value may be `FILE.py:name`: find them, check them, and use the copies of their files in a run.

A config declares such a setting with `configs.fields.custom_code`, which names the kind of code and the function that
checks it. This module names no setting. It does not import torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.config.config_keys import list_keys, replace_values
from common.config.custom_function import locate_file_copy, replace_file_with_run_copy
from common.config.lookup import import_object

S = TypeVar("S")


@dataclass(frozen=True)
class CustomSetting:
    """Setting of a config whose value may be `FILE.py:name`."""

    key: str
    """Key of the setting, such as `optim.decay`."""
    value: str
    default: str
    kind: str
    """Kind of the code, such as `decay`; part of the name of the copy that a run keeps."""
    checker: str
    """Import path `module:function` of the function that checks this setting of a config."""
    rank_0_only: bool
    """True if only rank 0 reads the file; the file may be missing on other hosts."""


def list_custom_settings(settings: Any) -> Iterator[CustomSetting]:
    """Yield the settings of a config, or of one of its groups, that are declared with `custom_code`."""
    for key in list_keys(type(settings)).values():
        if "custom_code" in key.metadata:
            yield CustomSetting(key.name, key.get_value(settings), key.default, **key.metadata["custom_code"])


def check_custom_settings(
    settings: Any, code: Path | None = None, new_settings: Container[str] = (), *, is_main: bool = True
) -> None:
    """Check all custom settings of a config. Raises UserError.

    `code` is the source folder of an existing run with these settings. Copies in this folder are checked instead of the
    original files, except for the keys in `new_settings`, which name new files. A rank other than rank 0 passes
    `is_main=False`, and skips the settings that only rank 0 reads. Default values are valid and are not checked.
    """
    resolved = use_file_copies(settings, code, new_settings) if code else settings
    checked = set()
    for setting in list_custom_settings(settings):
        is_skipped = setting.value == setting.default or (setting.rank_0_only and not is_main)
        if is_skipped or setting.checker in checked:
            continue
        checked.add(setting.checker)
        import_object(setting.checker)(resolved)


def use_file_copies(settings: S, code: Path, new_settings: Container[str] = ()) -> S:
    """Return settings that refer to the copies in a run's source folder `code` instead of the original files.

    Settings without a copy, and the keys in `new_settings`, are unchanged.
    """
    copies = {}
    for setting in list_custom_settings(settings):
        if setting.key not in new_settings:
            copy = locate_file_copy(setting.kind, setting.value, code)
            copies[setting.key] = replace_file_with_run_copy(setting.value, copy)
    return replace_values(settings, copies)
