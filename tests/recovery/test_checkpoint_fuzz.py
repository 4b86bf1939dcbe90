"""Random corruptions of a run's checkpoints, and kills while they are saved: always the right state, or a refusal."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.checkpoint import rank_file, storage
from common.checkpoint.checkpointer import Checkpointer, CheckpointState
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.storage import CheckpointPath, Manifest, StagingDir
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.system.errors import UserError
from configs.shared import Checkpoint
from tests.harness import warm
from tests.harness.chance import ALL_CASES_VARIABLE, draw_seed
from tests.harness.processes import environment

ROUNDS = 300 if os.environ.get(ALL_CASES_VARIABLE) else 100
RANKS = 2
STRANGER = 12345  # a user that is neither us nor root
SAVED = {1: (1, 2, 3), 2: (3, 4, 5)}  # attempt: steps; the second one continues step 2 of the first
COUNTING = [(2, 5), (2, 4), (2, 3), (1, 2), (1, 1)]  # the best choice first


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A real group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    dist.destroy_process_group()


def part_of(attempt: int, step: int, rank: int) -> CheckpointState:
    """Every value tells who saved it when."""
    value = torch.full((4,), attempt * 1e4 + step * 100 + rank)
    return CheckpointState(
        {f"w{rank}": value}, {f"w{rank}": {"m": -value}}, {"id": f"{attempt}/{step}"}, {"mine": value}
    )


@pytest.fixture(scope="module")
def sound(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts whose checkpoints have the files of two processes."""
    folder = RunFolder(tmp_path_factory.mktemp("fuzz") / "run")
    folder.path.mkdir()
    for number, steps in SAVED.items():
        attempt = folder.claim_attempt()
        attempt.record_parent_attempt(number - 1 or None, 2 if number > 1 else 0)
        for step in steps:
            draft = StagingDir(attempt, step)
            entries = {}
            draft.create()
            for rank in range(RANKS):
                seat = dataclasses.replace(world, rank=rank, size=RANKS)
                saver = Checkpointer(attempt, Ranks(seat), Checkpoint(), print)
                content = saver._collect_rank_content(step, part_of(number, step, rank))
                name = storage.make_rank_file_name(rank)
                entries[name] = rank_file.write_rank_file(draft.path / name, content)
            draft.publish(Manifest(step, number, RANKS, entries, {}))
        draft.path.with_name("latest").write_text(f"{CheckpointPath(attempt, steps[-1]).name}\n")
    return folder.path


class Vandal:
    """Damages the checkpoints of a run folder, with everything taken from one random stream."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.chance = chance
        self.done = list[str]()
        self.places = [
            CheckpointPath(RunFolder(path, attempt), step).path for attempt, steps in SAVED.items() for step in steps
        ]
        kinds = ("flip", "flip", "truncate", "grow", "delete", "swap", "swap_folders", "copy_folder", "manifest")
        self.kinds = (
            *kinds,
            "link",
            "link_folder",
            "folder_for_file",
            "half",
            *(["owner"] if not os.geteuid() else []),
        )

    def damage(self) -> None:
        kind = self.chance.choice(self.kinds)
        one, other = self.chance.sample(self.places, 2)
        name, other_name = (self.chance.choice(["rank-0.pt", "rank-1.pt", "manifest.json"]) for _ in range(2))
        try:
            getattr(self, kind)(one, other, one / name, self.chance.choice([one, other]) / other_name)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            kind += " (in vain)"  # an earlier damage was in the way
        self.done.append(f"{kind}: {'/'.join(one.parts[-3:])} {name}, {'/'.join(other.parts[-3:])} {other_name}")

    def flip(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        content = bytearray(file.read_bytes())
        for _ in range(self.chance.choice([1, 1, 20])):
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        file.write_bytes(content)

    def truncate(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        os.truncate(file, self.chance.choice([0, 1, self.chance.randrange(file.stat().st_size)]))

    def grow(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        with open(file, "ab") as content:
            content.write(self.chance.randbytes(self.chance.randint(1, 2000)))

    def delete(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        if self.chance.random() < 0.3:
            shutil.rmtree(one)
        else:
            file.unlink()

    def swap(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        """Between ranks or between steps."""
        mine = file.read_bytes()
        theirs = other_file.read_bytes()
        file.write_bytes(theirs)
        other_file.write_bytes(mine)

    def swap_folders(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        one.rename(one.with_name("aside"))
        other.rename(one)
        one.with_name("aside").rename(other)

    def copy_folder(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        shutil.rmtree(one)
        shutil.copytree(other, one)

    def manifest(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        """Somebody's own manifest, half of the time with a checksum that fits."""
        path = one / "manifest.json"
        content: Any = json.loads(path.read_text())
        wrong = [-1, 0, 2**80, 1.5, "x", None, [], {}, [[]], {"rank-0.pt": {}}, {"../x": 1}, float("nan"), float("inf")]
        content[self.chance.choice(sorted(content))] = self.chance.choice(wrong)
        if self.chance.random() < 0.2:
            content = self.chance.choice(wrong)
        elif self.chance.random() < 0.6:
            content.pop("sha256")
            content["sha256"] = storage.hash_manifest(content)
        path.write_text(json.dumps(content))

    def link(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        file.unlink()
        file.symlink_to(self.chance.choice([other_file, file, Path("nowhere")]))

    def link_folder(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        shutil.rmtree(one)
        one.symlink_to(other)

    def folder_for_file(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        file.unlink()
        file.mkdir()

    def half(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        one.rename(one.with_name(f".{one.name}.new"))

    def owner(self, one: Path, other: Path, file: Path, other_file: Path) -> None:
        os.chown(self.chance.choice([one, file]), STRANGER, STRANGER, follow_symlinks=False)


def untouched(place: Path, original: Path) -> bool:
    """Whether a checkpoint is what it was, to the last byte."""
    if place.is_symlink() or not place.is_dir() or place.stat().st_uid == STRANGER:
        return False
    for file in original.iterdir():
        mine = place / file.name
        if mine.is_symlink() or not mine.is_file() or mine.stat().st_uid == STRANGER:
            return False
        if mine.read_bytes() != file.read_bytes():
            return False
    return True


def as_saved(loaded: LoadedCheckpoint) -> bool:
    """Whether every value is the one that this attempt saved at this step."""
    parts = [part_of(loaded.attempt, loaded.step, rank) for rank in range(RANKS)]
    good = loaded.common == parts[0].common and loaded.model.keys() == {"w0", "w1"} == loaded.optimizer.keys()
    for rank, part in enumerate(parts):
        good = good and torch.equal(loaded.model[f"w{rank}"], part.model[f"w{rank}"])
        good = good and torch.equal(loaded.optimizer[f"w{rank}"]["m"], part.optimizer[f"w{rank}"]["m"])
    return good


def check(world: World, path: Path, original: Path) -> str:
    """Load, and compare with what may be loaded; returns what happened."""
    places = [CheckpointPath(RunFolder(path, attempt), step).path for attempt, step in COUNTING]
    good = [untouched(place, original / place.relative_to(path)) for place in places]
    there = [place.is_symlink() or place.exists() for place in places]
    said: list[str] = []
    try:
        loaded = Checkpointer(RunFolder(path).claim_attempt(), Ranks(world), Checkpoint(), said.append).load()
    except UserError as error:
        assert not any(good)
        assert "no valid checkpoint left" in str(error)
        if any(there):  # else all are lost
            assert len(said) == sum(there)
        return "refused"
    assert loaded is not None, "work would be lost without a word"
    number = COUNTING.index((loaded.attempt, loaded.step))
    assert number <= good.index(True) if any(good) else True, "a sound one was passed over"
    assert as_saved(loaded), "wrong weights"
    for (attempt, step), present in zip(COUNTING[:number], there, strict=False):
        named = any(line.startswith(f"ignoring checkpoint step-{step:08d} of attempt {attempt}: ") for line in said)
        assert named == present, "it must be said which one is ignored"
    return "newest" if number == 0 else "older"


def test_random_corruptions(world: World, sound: Path, tmp_path: Path) -> None:
    seed = draw_seed("corruptions")
    outcomes: dict[str, int] = {}
    for number in range(ROUNDS):
        path = tmp_path / str(number)
        shutil.copytree(sound, path)
        vandal = Vandal(path, random.Random(f"{seed}/{number}"))
        for _ in range(vandal.chance.choice([1, 2, 4, 8, 20])):
            vandal.damage()
        try:
            outcome = check(world, path, sound)
        except Exception as error:
            raise AssertionError(f"round {number} of {seed}, after {'; '.join(vandal.done)}: {error!r}") from error
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(path)
    print(outcomes)
    assert outcomes["older"] > ROUNDS / 6
    assert outcomes["refused"]
    assert outcomes["newest"], "damage of every degree"


def test_every_start_finds_the_newest_complete_checkpoint_wherever_the_last_one_was_killed(tmp_path: Path) -> None:
    """Killed at random times in the middle of saving."""
    argv = [sys.executable, "-m", "tests.harness.checkpoints", "kill", str(tmp_path), draw_seed("kills")]
    completed = warm.execute(argv, env=environment())
    assert completed.returncode == 0, completed.stderr
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert len(notes) == 21
    for before, after in pairwise(notes):
        assert after["right"]
        assert after["newest"] == after["step"]
        assert after["step"] >= before["step"]
        assert not any("step-" in word for word in after["said"]), "no complete one is ever damaged"
    assert any(note["left"] for note in notes), "some were killed in the middle"
    assert notes[-1]["step"] >= 7
