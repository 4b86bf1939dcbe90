"""Damaged checkpoints, and kills during a save: a run loads the newest complete checkpoint or refuses to start."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import rank_file, storage
from common.checkpoint.checkpointer import Checkpointer, CheckpointState
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.storage import CheckpointPath, Manifest, StagingDir
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.system.errors import UserError
from configs.shared import Checkpoint
from tests.harness.environment.randomness import ALL_CASES_VARIABLE, draw_seed
from tests.harness.ranks.programs import check_program

ROUNDS = 300 if os.environ.get(ALL_CASES_VARIABLE) else 100
RANKS = 2
FOREIGN_USER = 12345  # neither this user nor root
SAVED = {1: (1, 2, 3), 2: (3, 4, 5)}  # attempt: steps; the second attempt continues from step 2 of the first
RESUMABLE = [(2, 5), (2, 4), (2, 3), (1, 2), (1, 1)]  # attempt and step, the best choice first


def make_state(attempt: int, step: int, rank: int) -> CheckpointState:
    """Return a state whose values are unique to attempt, step and rank."""
    value = torch.full((4,), attempt * 1e4 + step * 100 + rank)
    name = f"w{rank}"
    return CheckpointState({name: value}, {name: {"m": -value}}, {"id": f"{attempt}/{step}"}, {"mine": value})


def list_checkpoint_paths(run_path: Path, checkpoints: Iterable[tuple[int, int]]) -> list[Path]:
    """Return the folders of checkpoints, each given as attempt and step."""
    return [CheckpointPath(RunFolder(run_path, attempt), step).path for attempt, step in checkpoints]


@pytest.fixture(scope="module")
def undamaged_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts whose checkpoints have the files of two ranks."""
    folder = RunFolder(tmp_path_factory.mktemp("fuzz") / "run")
    folder.path.mkdir()
    for number, steps in SAVED.items():
        attempt = folder.claim_attempt()
        attempt.record_parent_attempt(number - 1 or None, 2 if number > 1 else 0)
        for step in steps:
            write_checkpoint(world, attempt, step)
        latest = CheckpointPath(attempt, steps[-1])
        latest.path.with_name("latest").write_text(f"{latest.name}\n")
    return folder.path


def write_checkpoint(world: World, attempt: RunFolder, step: int) -> None:
    """Save a checkpoint as RANKS ranks do."""
    draft = StagingDir(attempt, step)
    draft.create()
    entries = {}
    for rank in range(RANKS):
        rank_world = dataclasses.replace(world, rank=rank, size=RANKS)
        checkpointer = Checkpointer(attempt, Ranks(rank_world), Checkpoint(), print)
        content = checkpointer._collect_rank_content(step, make_state(attempt.number, step, rank))
        name = storage.make_rank_file_name(rank)
        entries[name] = rank_file.write_rank_file(draft.path / name, content)
    draft.publish(Manifest(step, attempt.number, RANKS, entries, {}))


class Vandal:
    """Damages random checkpoints of a run. Every method from `flip` on does one kind of damage.

    Each draw chooses two checkpoints and a file: `checkpoint`, `other_checkpoint`, `file` in the former, and
    `other_file` in either of them.
    """

    KINDS = (
        *("flip", "flip", "truncate", "grow", "delete", "swap", "swap_folders", "copy_folder", "manifest"),
        *("link", "link_folder", "folder_for_file", "half"),
    )
    FILES = ("rank-0.pt", "rank-1.pt", "manifest.json")

    def __init__(self, run_path: Path, chance: random.Random) -> None:
        self.chance = chance
        self.log: list[str] = []
        self.checkpoints: list[Path] = []
        for attempt, steps in SAVED.items():
            self.checkpoints += list_checkpoint_paths(run_path, [(attempt, step) for step in steps])
        self.kinds = list(self.KINDS)
        if not os.geteuid():
            self.kinds.append("owner")

    def damage(self) -> None:
        """Do one kind of damage, and note it in the log."""
        kind = self.chance.choice(self.kinds)
        self.checkpoint, self.other_checkpoint = self.chance.sample(self.checkpoints, 2)
        self.file = self.checkpoint / self.chance.choice(self.FILES)
        other_name = self.chance.choice(self.FILES)
        self.other_file = self.chance.choice([self.checkpoint, self.other_checkpoint]) / other_name
        try:
            getattr(self, kind)()
        except (OSError, ValueError):
            assert self.log, f"{kind} fails on an undamaged run"
            kind += " (prevented by earlier damage)"
        paths = [self.file, self.other_checkpoint, self.other_file]
        names = ["/".join(path.parts[-4:]) for path in paths]
        self.log.append(f"{kind}: {', '.join(names)}")

    def flip(self) -> None:
        content = bytearray(self.file.read_bytes())
        for _ in range(self.chance.choice([1, 1, 20])):
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        self.file.write_bytes(content)

    def truncate(self) -> None:
        random_length = self.chance.randrange(self.file.stat().st_size)
        os.truncate(self.file, self.chance.choice([0, 1, random_length]))

    def grow(self) -> None:
        with open(self.file, "ab") as content:
            content.write(self.chance.randbytes(self.chance.randint(1, 2000)))

    def delete(self) -> None:
        if self.chance.random() < 0.3:
            shutil.rmtree(self.checkpoint)
        else:
            self.file.unlink()

    def swap(self) -> None:
        """Exchange the files of two ranks or of two steps."""
        content = self.file.read_bytes()
        self.file.write_bytes(self.other_file.read_bytes())
        self.other_file.write_bytes(content)

    def swap_folders(self) -> None:
        aside = self.checkpoint.with_name("aside")
        self.checkpoint.rename(aside)
        self.other_checkpoint.rename(self.checkpoint)
        aside.rename(self.other_checkpoint)

    def copy_folder(self) -> None:
        shutil.rmtree(self.checkpoint)
        shutil.copytree(self.other_checkpoint, self.checkpoint)

    def manifest(self) -> None:
        """Write a wrong manifest, half of the time with a correct checksum."""
        path = self.checkpoint / "manifest.json"
        content: Any = json.loads(path.read_text())
        if not isinstance(content, dict) or "sha256" not in content:
            raise ValueError(f"damaged manifest: {content}")
        wrong = [-1, 0, 2**80, 1.5, "x", None, [], {}, [[]], {"rank-0.pt": {}}, {"../x": 1}, float("nan"), float("inf")]
        content[self.chance.choice(sorted(content))] = self.chance.choice(wrong)
        if self.chance.random() < 0.2:
            content = self.chance.choice(wrong)
        elif self.chance.random() < 0.6:
            content.pop("sha256")
            content["sha256"] = storage.hash_manifest(content)
        path.write_text(json.dumps(content))

    def link(self) -> None:
        self.file.unlink()
        self.file.symlink_to(self.chance.choice([self.other_file, self.file, Path("nowhere")]))

    def link_folder(self) -> None:
        shutil.rmtree(self.checkpoint)
        self.checkpoint.symlink_to(self.other_checkpoint)

    def folder_for_file(self) -> None:
        self.file.unlink()
        self.file.mkdir()

    def half(self) -> None:
        self.checkpoint.rename(self.checkpoint.with_name(f".{self.checkpoint.name}.new"))

    def owner(self) -> None:
        path = self.chance.choice([self.checkpoint, self.file])
        os.chown(path, FOREIGN_USER, FOREIGN_USER, follow_symlinks=False)


def is_foreign(path: Path) -> bool:
    """Return whether a path is a symbolic link or belongs to another user."""
    return path.is_symlink() or path.stat().st_uid == FOREIGN_USER


def is_unchanged(checkpoint: Path, original: Path) -> bool:
    """Return whether a checkpoint equals the original to the last byte."""
    if not checkpoint.is_dir() or is_foreign(checkpoint):
        return False
    for original_file in original.iterdir():
        file = checkpoint / original_file.name
        if not file.is_file() or is_foreign(file):
            return False
        if file.read_bytes() != original_file.read_bytes():
            return False
    return True


def has_saved_values(loaded: LoadedCheckpoint) -> bool:
    """Return whether every value is the one that this attempt saved at this step."""
    states = [make_state(loaded.attempt, loaded.step, rank) for rank in range(RANKS)]
    if loaded.common != states[0].common:
        return False
    if loaded.model.keys() != {"w0", "w1"} or loaded.optimizer.keys() != {"w0", "w1"}:
        return False
    for rank, state in enumerate(states):
        name = f"w{rank}"
        if not torch.equal(loaded.model[name], state.model[name]):
            return False
        if not torch.equal(loaded.optimizer[name]["m"], state.optimizer[name]["m"]):
            return False
    return True


def check_load(world: World, path: Path, original: Path) -> str:
    """Load, and check that the right checkpoint was chosen. Returns which one: newest, older or refused."""
    checkpoints = list_checkpoint_paths(path, RESUMABLE)
    valid = [is_unchanged(checkpoint, original / checkpoint.relative_to(path)) for checkpoint in checkpoints]
    present = [checkpoint.is_symlink() or checkpoint.exists() for checkpoint in checkpoints]
    messages: list[str] = []
    try:
        loaded = Checkpointer(RunFolder(path).claim_attempt(), Ranks(world), Checkpoint(), messages.append).load()
    except UserError as error:
        assert not any(valid)
        is_foreign = any("belongs to user ID" in message for message in messages)
        assert ("no checkpoint can be read" if is_foreign else "no valid checkpoint left") in str(error)
        if any(present):  # else all checkpoints are lost
            assert len(messages) == sum(present)
        return "refused"
    assert loaded is not None, "a run with checkpoints restarts from step 0"
    number = RESUMABLE.index((loaded.attempt, loaded.step))
    if any(valid):
        assert number <= valid.index(True), "a valid checkpoint was ignored"
    assert has_saved_values(loaded), "wrong weights"
    for (attempt, step), is_present in zip(RESUMABLE[:number], present, strict=False):
        start = f"ignoring checkpoint step-{step:08d} of attempt {attempt}: "
        is_reported = any(line.startswith(start) for line in messages)
        assert is_reported == is_present, "every ignored checkpoint is reported"
    return "newest" if number == 0 else "older"


def test_random_corruptions(world: World, undamaged_run: Path, tmp_path: Path) -> None:
    seed = draw_seed("corruptions")
    outcomes: Counter[str] = Counter()
    for number in range(ROUNDS):
        path = tmp_path / str(number)
        shutil.copytree(undamaged_run, path)
        vandal = Vandal(path, random.Random(f"{seed}/{number}"))
        for _ in range(vandal.chance.choice([1, 2, 4, 8, 20])):
            vandal.damage()
        try:
            outcome = check_load(world, path, undamaged_run)
        except Exception as error:
            raise AssertionError(f"round {number} of {seed}, after {'; '.join(vandal.log)}: {error!r}") from error
        outcomes[outcome] += 1
        shutil.rmtree(path)
    print(outcomes)
    # light and heavy damage both occurred
    assert outcomes["older"] > ROUNDS / 6
    assert outcomes["refused"]
    assert outcomes["newest"]


def test_every_start_loads_the_newest_complete_checkpoint_after_kills_during_a_save(tmp_path: Path) -> None:
    check_program("checkpoint_cases", tmp_path, draw_seed("kills"))
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert len(notes) == 21
    for before, after in pairwise(notes):
        assert after["equal"]
        assert after["newest"] == after["step"]
        assert after["step"] >= before["step"]
        reports_of_damage = [message for message in after["messages"] if "step-" in message]
        assert not reports_of_damage, "all checkpoints are complete"
    assert any(note["staging_folders"] for note in notes), "no kill interrupted a save"
    assert notes[-1]["step"] >= 7
