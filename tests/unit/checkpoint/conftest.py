"""Fixtures of the checkpoint tests: a group of one rank, and runs that save checkpoints."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint import storage
from common.checkpoint.checkpointer import Checkpointer
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.storage import CheckpointPath
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from configs.shared import Checkpoint
from tests.harness.ranks.checkpoint_cases import equals_saved_state, make_state


class RunWithCheckpoints:
    """The newest attempt of a run that saves checkpoints, and the messages about them."""

    def __init__(self, world: World, parent_folder: Path) -> None:
        self.world = world
        self.messages: list[str] = []
        run_folder = parent_folder / "run"
        run_folder.mkdir()
        self.folder = RunFolder(run_folder).claim_attempt()
        self.folder.record_parent_attempt(None, 0)
        self.checkpointer = self.make_checkpointer()

    def make_checkpointer(self, **settings: Any) -> Checkpointer:
        checkpoint_settings = Checkpoint(**{"retries": 0} | settings)
        return Checkpointer(self.folder, Ranks(self.world), checkpoint_settings, self.messages.append)

    def save(self, *steps: int, best: bool = False) -> None:
        for step in steps:
            assert self.checkpointer.save(step, make_state(step), best=best)

    def load_checkpoint(self) -> LoadedCheckpoint:
        loaded = self.checkpointer.load()
        assert loaded is not None
        return loaded

    def load(self) -> int | None:
        """Load a checkpoint, compare it with what was saved, and return its step."""
        loaded = self.checkpointer.load()
        if loaded is None:
            return None
        assert equals_saved_state(loaded, 0)
        return loaded.step

    def restart(self, parent_attempt: int, step: int) -> None:
        """Start another attempt, which continues after a step of its parent."""
        self.folder = self.folder.claim_attempt()
        self.folder.record_parent_attempt(parent_attempt, step)
        self.checkpointer = self.make_checkpointer()

    def get_attempt(self, number: int) -> RunFolder:
        return RunFolder(self.folder.path, number)

    def list_steps(self, attempt_number: int) -> list[int]:
        """Return the steps of the checkpoints of an attempt."""
        self.checkpointer.wait_for_deletions()
        return [checkpoint.step for checkpoint in storage.list_checkpoints(self.get_attempt(attempt_number))]

    def get_checkpoint(self, step: int) -> Path:
        return CheckpointPath(self.folder, step).path

    def get_rank_file(self, step: int) -> Path:
        return self.get_checkpoint(step) / "rank-0.pt"

    def get_manifest(self, step: int) -> Path:
        return self.get_checkpoint(step) / "manifest.json"

    def list_names(self) -> list[str]:
        """Return the names in the checkpoints folder of the newest attempt."""
        self.checkpointer.wait_for_deletions()
        return sorted(path.name for path in storage.get_checkpoints_dir(self.folder).iterdir())


@pytest.fixture
def run(world: World, tmp_path: Path) -> RunWithCheckpoints:
    return RunWithCheckpoints(world, tmp_path)


@pytest.fixture
def small_disk_run(world: World, tmp_path: Path) -> Iterator[RunWithCheckpoints]:
    """Create a run on a separate disk of one megabyte."""
    disk = tmp_path / "small"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.skip(f"NOT CHECKED: no small disk can be mounted here: {process.stderr.strip()}")
    yield RunWithCheckpoints(world, disk)
    subprocess.run(["umount", "-l", disk], check=True)
