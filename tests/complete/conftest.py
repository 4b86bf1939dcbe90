"""Fixtures of the tests of this folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.commands import execution
from tests.harness.commands.exit_status import Completed
from tests.harness.repository import ROOT


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of benchmarks are forks of the fork server."""
    from tests.benchmarks import parts

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Completed:
        return execution.execute_command([command[0], str(ROOT / command[1]), *command[2:]], env=env)

    monkeypatch.setattr(parts, "subprocess", SimpleNamespace(run=run))
