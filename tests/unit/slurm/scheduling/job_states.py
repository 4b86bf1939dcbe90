"""States of a job, as SLURM shows them one after another."""

from __future__ import annotations

from typing import Any

from tests.harness.slurm.fake_slurm import FakeSlurm

JOB: dict[str, Any] = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
"""Environment variables of a job that was requeued once."""


def make_state_script(fake: FakeSlurm, *states: str) -> str:
    """Return a shell command that prints one state per call, and the last state in all further calls."""
    file = fake.bin_folder.parent / "states"
    file.write_text("".join(f"{state}\n" for state in states))
    return f'head -1 {file}; [ "$(wc -l <{file})" = 1 ] || sed -i 1d {file}'
