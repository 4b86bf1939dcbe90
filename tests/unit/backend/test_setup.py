"""Settings of the backend `builtin` that cannot work are refused before a run is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.processes import FinishedRun, Settings, run_experiment

BUILTIN = "launch.backend=builtin"
INVALID_ALGORITHMS = """\
def wait(ranks):
    return [[('add', 0, 1), ('send', 0, 1)], [('add', 0, 0), ('send', 0, 0)]]
def forget(ranks):
    return [[('send', 0, 1)], [('receive', 0, 0)]]
"""


def run_refused(*settings: str, runs: Path, **environment: Any) -> FinishedRun:
    """Run an experiment, and check that it is refused in one line and creates no run."""
    process = run_experiment("ddp_multinode", *settings, runs=runs, status=2, **environment)
    assert process.stderr.count("\n") == 1, process.stderr
    assert not runs.exists()
    return process


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"PATH": "/nowhere"}, "launch.tls=true requires the openssl program, which "),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "launch.tls=true cannot be used with torchrun, because its rendezvous store",
        ),
    ],
    ids=["openssl", "torchrun"],
)
def test_unavailable_encryption_is_refused(
    environment: dict[str, Any], message: str, tmp_path: Path, digits: Settings
) -> None:
    process = run_refused(*digits, BUILTIN, "launch.tls=true", runs=tmp_path / "runs", **environment)
    assert process.stderr.startswith(f"error: {message}")


INVALID_SETTINGS = {
    f"{BUILTIN} launch.device=cuda": "launch.backend=builtin runs on CPUs only; omit",
    "launch.algorithm=tree": "launch.algorithm=tree requires launch.backend=builtin; add this setting",
    "launch.tls=true": "launch.tls=true requires launch.backend=builtin; add this setting",
    f"{BUILTIN} launch.algorithm=oak": "=oak: expected FILE.py:function or one of ring, ",
    f"{BUILTIN} launch.algorithm=FILE:wait": "custom.py:1: deadlock: rank 0, move 0",
    f"{BUILTIN} launch.algorithm=FILE:forget": "ends without the values of rank",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused_before_the_run_starts(
    settings: str, message: str, tmp_path: Path, digits: Settings
) -> None:
    file = tmp_path / "custom.py"
    file.write_text(INVALID_ALGORITHMS)
    process = run_refused(*digits, *settings.replace("FILE", str(file)).split(), runs=tmp_path / "runs")
    assert message in process.stderr
