"""The check for changes of objects of other packages finds each kind of change."""

from __future__ import annotations

from pathlib import Path

from tests.readability.assignments import Checker

OWNER = """
from dataclasses import dataclass

@dataclass
class Box:
    content: int = 0

    def set_content(self, value: int) -> None:
        self.content = value

    def remove_content(self) -> None:
        self.content = 0

    def double_content(self) -> None:
        self.content *= 2
"""
USER = """
from torch import nn

from common.data.box import Box


class User:
    def __init__(self, box: Box, layer: nn.Module, anything: object) -> None:
        self.box = box
        box.double_content()
        layer.width = 3
        box.content = 1
        self.box.content += 1
        self.box.set_content(2)
        self.box.remove_content()
        setattr(box, "content", 3)
        setattr(anything, "content", 3)
        object.__setattr__(box, "content", 4)
"""


def test_changes_of_objects_of_another_package_are_found(tmp_path: Path) -> None:
    for name, source in (("data/box.py", OWNER), ("measure/user.py", USER)):
        path = tmp_path / "common" / name
        path.parent.mkdir(parents=True)
        path.write_text(source)
    first_change = USER.splitlines().index("        box.content = 1") + 1
    changes = sorted(Checker(tmp_path).find_changes())
    assert [change.line for change in changes] == list(range(first_change, first_change + 7)), changes
