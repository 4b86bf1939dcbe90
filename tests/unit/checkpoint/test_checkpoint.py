"""Checkpoints: whole or not there, never wrong, and no fault of a disk ends a run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.checkpoint import checkpointer, extension, loading, rank_file, state_dicts, storage
from common.checkpoint.checkpointer import Checkpointer, CheckpointState
from common.checkpoint.storage import CheckpointPath
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.system.causes import Cause
from common.system.errors import RunTakenError, UserError
from common.training import optimizers
from configs.ddp_multinode import Config
from configs.shared import Checkpoint, Optim
from tests.harness import warm
from tests.harness.checkpoints import right, state_of
from tests.harness.permissions import permissions_apply
from tests.harness.processes import environment
from tests.harness.shared import make_once

STRANGER = 12345  # a user that is neither us nor root
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT CHECKED: only root can give files away or mount disks")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A real group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    dist.destroy_process_group()


class Disk:
    """A run folder with checkpoints, and what was said."""

    def __init__(self, world: World, path: Path) -> None:
        self.world, self.said = world, list[str]()
        (path / "run").mkdir()
        self.folder = RunFolder(path / "run").claim_attempt()
        self.folder.record_parent_attempt(None, 0)
        self.checkpoints = self.start()

    def start(self, **settings: Any) -> Checkpointer:
        return Checkpointer(self.folder, Ranks(self.world), Checkpoint(**{"retries": 0} | settings), self.said.append)

    def save(self, *steps: int) -> None:
        for step in steps:
            assert self.checkpoints.save(step, state_of(step))

    def load(self) -> int | None:
        """The step that is loaded; its values are compared with what was saved."""
        loaded = self.checkpoints.load()
        assert loaded is None or right(loaded, 0)
        return loaded.step if loaded else None

    def at(self, step: int, name: str = "") -> Path:
        return CheckpointPath(self.folder, step).path / name

    def names(self) -> list[str]:
        self.checkpoints.wait_for_deletions()
        return sorted(path.name for path in storage.get_checkpoints_dir(self.folder).iterdir())

    def restart(self, parent: int | None, step: int) -> None:
        self.folder = self.folder.claim_attempt()
        self.folder.record_parent_attempt(parent, step)
        self.checkpoints = self.start()


@pytest.fixture
def disk(world: World, tmp_path: Path) -> Disk:
    return Disk(world, tmp_path)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def weights_at(path: Path) -> int:
    """Where the numbers of the first tensor lie in a file: no flipped bit there makes it unreadable."""
    first = np.arange(8, dtype=np.float32) + 1000 * int(path.parent.name[5:])
    return path.read_bytes().index(first.tobytes())


# ---- what is saved comes back


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()


def test_everything_comes_back(disk: Disk) -> None:
    base = torch.arange(100_000.0)
    model = {"view": base[10:14], "half": torch.ones(3, dtype=torch.bfloat16), "count": torch.tensor(7), "no": base[:0]}
    model["parameter"] = nn.Parameter(torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]]))
    common = {"text": "é", "deep": {"list": [1, (2.5, None, True)], 3: b"\x00"}, "huge": 2**70, "nan": float("inf")}
    assert disk.checkpoints.save(
        5, CheckpointState(model, {"view": {"step": 3, "m": base[:4]}}, common, {"mine": base[:2]})
    )
    loaded = disk.checkpoints.load()
    assert loaded is not None and (loaded.step, loaded.attempt, loaded.processes, loaded.resumes_exactly) == (
        5,
        1,
        1,
        True,
    )
    for name, value in model.items():
        back = loaded.model[name]
        assert back.dtype == value.dtype and back.shape == value.shape
        assert bits(back) == bits(value), name
    assert loaded.common == common and loaded.optimizer["view"]["m"].tolist() == [0, 1, 2, 3]
    assert loaded.local is not None and loaded.local["mine"].tolist() == [0, 1]
    assert disk.at(5, "rank-0.pt").stat().st_size < 20_000, "not all of what a view is cut from"


@pytest.mark.parametrize(
    ("thing", "place"),
    [
        ({"a": [np.float64(1)]}, "common['a'][0] has type float64"),
        ({"a": {1}}, "common['a'] has type set"),
        ({"a": {"b": nn.Linear(1, 1)}}, "common['a']['b'] has type Linear"),
    ],
)
def test_what_could_not_be_read_again_is_refused_at_once(disk: Disk, thing: Any, place: str) -> None:
    with pytest.raises(TypeError) as error:
        disk.checkpoints.save(1, CheckpointState({}, {}, thing))
    assert place in str(error.value)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb"])
def test_an_optimizer_goes_on_to_the_bit(disk: Disk, name: Any) -> None:
    settings = Optim(name=name, lr=0.01, weight_decay=0.01)

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        return model, optimizers.build_optimizer(model.parameters(), settings)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(4, 3)).pow(2).mean().backward()
            optimizer.step()

    model, optimizer = build(1)
    train(model, optimizer)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    memory = state_dicts.collect_optimizer_state(optimizer, model.named_parameters())
    disk.checkpoints.save(
        3,
        CheckpointState(
            state_dicts.gather_full_tensors(tensors), memory, {}, {"random": state_dicts.capture_rng_state()}
        ),
    )
    train(model, optimizer)

    other, resumed = build(2)
    loaded = disk.checkpoints.load()
    assert loaded is not None and loaded.local is not None
    state_dicts.load_tensors([*other.named_parameters(), *other.named_buffers()], loaded.model)
    state_dicts.load_optimizer_state(resumed, other.named_parameters(), loaded.optimizer)
    state_dicts.restore_rng_state(loaded.local["random"])
    train(other, resumed)
    for (key, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs) and ours.isfinite().all(), key


def test_a_stage_takes_its_part_of_the_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optimizers.build_optimizer(model.parameters(), Optim())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved, memory = (
        state_dicts.gather_full_tensors(model.named_parameters()),
        state_dicts.collect_optimizer_state(optimizer, model.named_parameters()),
    )
    stage = nn.Linear(2, 2)
    named = [(f"1.{name}", parameter) for name, parameter in stage.named_parameters()]
    resumed = optimizers.build_optimizer(stage.parameters(), Optim())
    state_dicts.load_tensors(named, saved)
    state_dicts.load_optimizer_state(resumed, named, memory)
    last = model.get_parameter("1.weight")
    assert torch.equal(stage.weight, last)
    ours, theirs = resumed.state[stage.weight]["momentum_buffer"], optimizer.state[last]["momentum_buffer"]
    assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize(
    ("module", "word"), [(nn.Linear(2, 3), "shape"), (nn.BatchNorm1d(2), "has no tensor running_mean")]
)
def test_another_model_is_refused(module: nn.Module, word: str) -> None:
    saved = state_dicts.gather_full_tensors(nn.Linear(2, 2).named_parameters())
    with pytest.raises(UserError, match=word):
        state_dicts.load_tensors([*module.named_buffers(), *module.named_parameters()], saved)


def test_random_streams_go_on() -> None:
    def draw() -> list[Any]:
        numbers = [random.random(), random.gauss()]
        return [torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(1).tolist(), numbers]

    draw()  # leaves the second number of a pair behind, in numpy and in python
    kept = state_dicts.capture_rng_state()
    first = draw()
    assert all(one != other for one, other in zip(first, draw(), strict=True))
    state_dicts.restore_rng_state(kept)
    assert first == draw()


# ---- how they come and go


def test_the_newest_ones_and_the_best_are_kept(disk: Disk) -> None:
    disk.save(1, 2)
    assert disk.checkpoints.save(3, state_of(3), best=True)
    disk.save(4, 5, 6)
    assert disk.names() == ["best", "latest", *(f"step-{n:08d}" for n in (3, 5, 6))]
    assert (disk.at(6).parent / "latest").read_text() == "step-00000006\n"
    assert (disk.at(6).parent / "best").read_text() == "step-00000003\n"
    assert disk.checkpoints.save(6, state_of(6), best=True), "a step is not written twice, but it can become the best"
    disk.save(7)
    assert disk.names() == ["best", "latest", "step-00000006", "step-00000007"]


def test_a_start_that_was_superseded_saves_and_removes_nothing(disk: Disk) -> None:
    old, older = disk.checkpoints, RunFolder(disk.folder.path, 1)
    disk.save(1, 2)
    disk.restart(1, 1)
    for step in (3, 4, 5):
        with pytest.raises(
            RunTakenError, match=r"attempt 1 of run was superseded by attempt 2; stopping without saving"
        ):
            old.save(step, state_of(step))
    assert [s.step for s in storage.list_checkpoints(older)] == [1, 2] and not storage.list_staging_dirs(older)
    assert disk.load() == 1, "what it saved after the new start branched off does not count"
    disk.save(2)
    assert disk.load() == 2
    assert [(s.attempt.number, s.step) for s in storage.list_resumable_checkpoints(disk.folder)] == [(2, 2), (1, 1)]


def test_older_starts_keep_theirs_until_this_one_has_enough(disk: Disk) -> None:
    disk.save(1)
    assert disk.checkpoints.save(2, state_of(2), best=True)
    disk.save(3)
    older = RunFolder(disk.folder.path, 1)
    (older.attempt_folder / "checkpoints" / ".step-00000004.new").mkdir()
    disk.restart(1, 3)
    disk.save(4)
    assert [s.step for s in storage.list_checkpoints(older)] == [2, 3], "one of its own may turn out damaged"
    disk.save(5)
    disk.checkpoints.wait_for_deletions()
    assert [s.step for s in storage.list_checkpoints(older)] == [2], "the best so far"
    assert sorted(p.name for p in (older.attempt_folder / "checkpoints").iterdir()) == [
        "best",
        "latest",
        "step-00000002",
    ]
    assert disk.checkpoints.save(6, state_of(6), best=True)
    disk.checkpoints.wait_for_deletions()
    assert not storage.list_checkpoints(older) and disk.load() == 6


def test_many_attempts_keep_no_more_than_one_does(disk: Disk) -> None:
    for step in range(1, 21):
        disk.save(step)
        disk.checkpoints.wait_for_deletions()
        there = [s.step for one in disk.folder.list_attempts() for s in storage.list_checkpoints(one)]
        assert there == [step - 1, step][-step:]
        disk.restart(disk.folder.number, step)


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: os.truncate(file, 3)])
@pytest.mark.parametrize("name", ["rank-0.pt", storage.MANIFEST])
def test_damaged_ones_do_not_count_as_kept(disk: Disk, name: str, harm: Callable[[Path], object]) -> None:
    disk.save(1, 2)
    harm(disk.at(2, name))
    disk.restart(1, 1)
    disk.save(3)
    disk.checkpoints.wait_for_deletions()
    older = RunFolder(disk.folder.path, 1)
    assert 1 in [s.step for s in storage.list_checkpoints(older)]
    harm(disk.at(3, name))
    assert disk.load() == 1
    disk.checkpoints = disk.start()
    disk.save(4, 5)
    disk.checkpoints.wait_for_deletions()
    assert not storage.list_checkpoints(older) and [s.step for s in storage.list_checkpoints(disk.folder)] == [4, 5]


def test_all_is_on_the_disk_before_the_rename(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real calls, taken down in their order: what a power failure leaves follows from it."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy(handle: int) -> None:
        fsync(handle)
        calls.append("sync " + Path(f"/proc/self/fd/{handle}").readlink().name.partition(".json.")[0])

    def rename_spy(self: Path, target: Path) -> Path:
        rename(self, target)
        calls.append(f"rename {self.name}")
        return target

    disk.save(1)
    disk.folder.metrics_file.write_text("{}\n")
    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(Path, "rename", rename_spy)
    disk.save(2)
    new = ".step-00000002.new"
    wanted = ["sync rank-0.pt", "sync metrics.jsonl", "sync manifest.json", f"sync {new}", f"rename {new}"]
    assert calls[: len(wanted) + 1] == [*wanted, "sync checkpoints"]


# ---- damage


def damage_manifest(disk: Disk, **changes: Any) -> None:
    """Change the manifest of step 2 and make its checksum fit."""
    path = disk.at(2, "manifest.json")
    content = json.loads(path.read_text()) | changes
    content.pop("sha256")
    path.write_text(json.dumps(content | {"sha256": storage.hash_manifest(content)}))


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def file_for_folder(path: Path) -> None:
    rmtree(path)
    path.touch()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil-was-here",)


def plant(disk: Disk) -> None:
    """A file that runs something when it is unpickled, with a manifest that fits."""
    path = disk.at(2, "rank-0.pt")
    torch.save({"model": Evil()}, path)
    entry = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    damage_manifest(disk, files={"rank-0.pt": entry})


DAMAGES: dict[str, tuple[Callable[[Disk], Any], str]] = {
    "a flipped bit": (lambda d: flip(d.at(2, "rank-0.pt"), 700), "rank-0.pt does not match its checksum"),
    "cut off": (lambda d: os.truncate(d.at(2, "rank-0.pt"), 999), "rank-0.pt has 999 bytes instead of"),
    "empty": (lambda d: os.truncate(d.at(2, "rank-0.pt"), 0), "rank-0.pt has 0 bytes instead of"),
    "no file": (lambda d: d.at(2, "rank-0.pt").unlink(), "rank-0.pt is missing"),
    "no manifest": (lambda d: d.at(2, "manifest.json").unlink(), "manifest.json is missing"),
    "garbage": (lambda d: d.at(2, "manifest.json").write_bytes(b"\xff{"), "manifest.json cannot be read"),
    "deep garbage": (lambda d: d.at(2, "manifest.json").write_text("[" * 10**6), "manifest.json cannot be read"),
    "a list": (lambda d: d.at(2, "manifest.json").write_text("[1]"), "manifest.json cannot be read"),
    "a changed manifest": (
        lambda d: d.at(2, "manifest.json").write_text(d.at(2, "manifest.json").read_text().replace(': 2,', ': 3,')),
        "manifest.json does not match its checksum",
    ),
    "a later format": (lambda d: damage_manifest(d, format=9), "manifest.json has format 9, but this version"),
    "a name outside": (
        lambda d: damage_manifest(d, files={"../../x.pt": {"bytes": 1, "sha256": ""}}),
        "does not list exactly one file for each",
    ),
    "steps swapped": (lambda d: swap(d.at(1), d.at(2)), "manifest.json belongs to step 1 of attempt 1"),
    "files of another step": (lambda d: swap(d.at(1, "rank-0.pt"), d.at(2, "rank-0.pt")), "rank-0.pt does not match"),
    "a link": (lambda d: link(d.at(2, "rank-0.pt")), "rank-0.pt is a symbolic link"),
    "a linked manifest": (lambda d: link(d.at(2, "manifest.json")), "manifest.json is a symbolic link"),
    "a linked folder": (lambda d: link(d.at(2)), "the checkpoint folder is a symbolic link"),
    "a pipe": (lambda d: fifo(d.at(2, "rank-0.pt")), "rank-0.pt is not a regular file"),
    "a file for a folder": (lambda d: file_for_folder(d.at(2)), "the checkpoint folder: Not a directory"),
    "a planted program": (plant, "rank-0.pt is damaged, or contains data other than tensors"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_older_one_used(
    disk: Disk, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    disk.save(1, 2)
    work, reason = DAMAGES[damage]
    work(disk)
    if damage in ("steps swapped", "files of another step"):
        with pytest.raises(UserError, match=r"no valid checkpoint left \(step-\d+ of .*, step-\d+ of "):
            disk.load()
    else:
        assert disk.load() == 1
    assert disk.said[0].startswith("ignoring checkpoint step-00000002 of attempt 1: ") and reason in disk.said[0]
    assert len(disk.said) == (2 if damage in ("steps swapped", "files of another step") else 1)
    assert not Path("evil-was-here").exists()


@needs_root
@pytest.mark.parametrize("name", ["", "rank-0.pt", "manifest.json"])
def test_what_another_user_wrote_is_refused(disk: Disk, name: str) -> None:
    disk.save(1, 2)
    os.chown(disk.at(2, name), STRANGER, STRANGER)
    assert disk.load() == 1
    assert f"belongs to user ID {STRANGER}; the current user ID is 0" in disk.said[0]


def test_without_checksums_wrong_weights_are_loaded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checksum is for: nobody else notices."""
    disk.save(1, 2)
    flip(disk.at(2, "rank-0.pt"), weights_at(disk.at(2, "rank-0.pt")))
    monkeypatch.setattr(
        storage,
        "read_verified_rank_file",
        lambda place, _, rank: storage.read_owned_file(place, f"rank-{rank}.pt", None),
    )
    loaded = disk.checkpoints.load()
    assert loaded is not None and loaded.step == 2 and not right(loaded, 0)
    monkeypatch.undo()
    assert disk.load() == 1


def test_without_what_a_file_says_of_itself_wrong_weights_are_loaded(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of another step whose checksum somebody made fit."""
    disk.save(1, 2)
    disk.at(2, "rank-0.pt").write_bytes(disk.at(1, "rank-0.pt").read_bytes())
    damage_manifest(disk, files=json.loads(disk.at(1, "manifest.json").read_text())["files"])
    assert disk.load() == 1
    assert "rank-0.pt belongs to step 1, attempt 1, rank 0 of 1" in disk.said[0]
    read = rank_file.read_rank_file
    monkeypatch.setattr(loading, "read_rank_file", lambda *where: read(*where) | {"step": 2})
    loaded = disk.checkpoints.load()
    assert loaded is not None and loaded.step == 2 and not right(loaded, 0)


@pytest.mark.parametrize("pointer", ["", "step-99999999\n", "../../..\n", "step-00000001\n", None])
def test_the_pointer_is_for_people_only(disk: Disk, pointer: str | None) -> None:
    disk.save(1, 2)
    path = disk.at(2).parent / "latest"
    path.unlink()
    if pointer is not None:
        path.write_text(pointer)
    assert disk.load() == 2 and disk.said == []
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")
    assert disk.load() == 2 and disk.said == []


def test_all_damaged_is_refused_with_the_remedy(disk: Disk) -> None:
    disk.save(1, 2)
    for step in (1, 2):
        flip(disk.at(step, "rank-0.pt"), 700)
    with pytest.raises(UserError) as error:
        disk.load()
    assert "no valid checkpoint left (step-" in str(error.value) and "attempts/*/checkpoints" in str(error.value)
    assert len(disk.said) == 2


def test_all_lost_is_refused_as_all_damaged_is(disk: Disk) -> None:
    disk.save(1, 2)
    for step in (1, 2):
        rmtree(disk.at(step))
    with pytest.raises(
        UserError, match=r"^no valid checkpoint left \(step-00000002 of attempt 1\); .*delete .*attempts/"
    ):
        disk.load()
    assert disk.said == ["step-00000002 of attempt 1 is missing: the checkpoint folder was deleted"]
    rmtree(disk.at(2).parent)
    assert disk.load() is None, "what the message says to do"


@pytest.mark.parametrize("name", ["", "rank-0.pt", "manifest.json"])
def test_without_permission_to_read_none_is_to_be_deleted(disk: Disk, name: str) -> None:
    disk.save(1, 2)
    for step in (1, 2):
        disk.at(step, name).chmod(0)
    with permissions_apply(), pytest.raises(UserError) as error:
        disk.load()
    assert "Permission denied" in disk.said[0] and "run chmod -R u+rwX " in str(error.value)
    assert "delete" not in str(error.value) and error.value.cause is Cause.OTHER
    flip(disk.at(2, "manifest.json"), 40)  # root can read it
    with permissions_apply(), pytest.raises(UserError, match=r"run chmod -R u\+rwX "):
        disk.load()
    disk.at(1, name).chmod(0o700)
    with permissions_apply():
        assert disk.load() == 1


def test_a_folder_without_permission_to_read_is_refused(disk: Disk) -> None:
    """Its checkpoints cannot be found, and the run would begin at step 0."""
    disk.save(1)
    disk.at(1).parent.chmod(0)
    with permissions_apply(), pytest.raises(UserError, match=r"/checkpoints cannot be read; .* run chmod -R u\+rwX "):
        extension.check_resume(disk.folder, Config())
    disk.at(1).parent.chmod(0o700)
    with permissions_apply():
        extension.check_resume(disk.folder, Config())


def test_a_replaced_checkpoint_is_not_named_as_missing(disk: Disk) -> None:
    disk.save(1, 2)
    disk.restart(1, 2)
    disk.save(3, 4)
    disk.checkpoints.wait_for_deletions()
    for step in (3, 4):
        rmtree(disk.at(step))
    assert [str(one) for one in storage.list_lost_checkpoints(disk.folder)] == ["step-00000004 of attempt 2"]


def test_a_half_written_one_is_never_read(disk: Disk) -> None:
    assert disk.load() is None and disk.said == []
    disk.save(1)
    (disk.at(1).parent / "latest").unlink()  # it is written later
    disk.at(1).rename(disk.at(1).with_name(".step-00000001.new"))
    assert disk.load() is None
    assert disk.said == ["ignoring 1 incomplete checkpoint; no complete checkpoint exists"]
    disk.checkpoints = disk.start()
    disk.save(2)
    assert disk.names() == ["latest", "step-00000002"], "the next one clears up"


def test_the_parents_checkpoints_are_used_until_there_are_own_ones(disk: Disk) -> None:
    disk.save(1, 2)
    disk.restart(1, 2)
    assert disk.load() == 2
    disk.save(3)
    disk.restart(2, 3)
    assert disk.load() == 3
    (disk.folder.path / "attempts/0002/checkpoints/step-00000003/rank-0.pt").unlink()
    assert disk.load() == 2 and disk.said[-1] == "ignoring checkpoint step-00000003 of attempt 2: rank-0.pt is missing"


# ---- disks


@pytest.fixture
def small(world: World, tmp_path: Path) -> Iterator[Disk]:
    """A run folder on a disk of its own, of one megabyte."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"NOT CHECKED: no small disk can be mounted here: {mounted.stderr.strip()}")
    yield Disk(world, path)
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("free", [0, 100, 4096, 20_000, 40_000])
def test_a_full_disk_is_told_and_training_goes_on(small: Disk, free: int) -> None:
    small.save(1, 2)
    ballast = small.folder.path / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            os.truncate(ballast, ballast.stat().st_size - free)
    content = CheckpointState({"w": torch.rand(20_000)}, {}, {})
    assert small.checkpoints.save(3, content) is False
    assert small.said[0].startswith("WARNING: no checkpoint was saved for step 3: ")
    assert os.strerror(errno.ENOSPC) in small.said[0] and "the newest checkpoint is from step 2" in small.said[0]
    assert small.names() == ["latest", "step-00000001", "step-00000002"], "nothing half-written"
    assert small.load() == 2
    said = len(small.said)
    assert small.checkpoints.save(4, content) is False and len(small.said) == said, "it is reported once"
    ballast.unlink()
    assert small.checkpoints.save(5, content)
    assert small.said[said:] == ["checkpoint saved after step 5; saving works again"]


def test_a_read_only_disk_is_told_and_training_goes_on(small: Disk) -> None:
    small.save(1)
    subprocess.run(["mount", "-o", "remount,ro", small.folder.path.parent], check=True)
    assert small.checkpoints.save(2, state_of(2)) is False
    assert os.strerror(errno.EROFS) in small.said[0]
    assert small.load() == 1
    subprocess.run(["mount", "-o", "remount,rw", small.folder.path.parent], check=True)
    assert small.checkpoints.save(3, state_of(3)) and small.load() == 3


def test_writing_is_tried_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the way goes away during the pause."""
    monkeypatch.setattr(checkpointer, "RETRY_SECONDS", 0.3)
    saved = storage.get_checkpoints_dir(disk.folder)
    saved.write_text("in the way")
    assert not disk.start(retries=0).save(1, state_of(1))
    timer = threading.Timer(0.1, saved.unlink)
    timer.start()
    assert disk.start(retries=1).save(1, state_of(1))
    timer.join()


# ---- processes


@pytest.fixture(scope="module")
def two(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two real processes found, case by case, and where; they also load what this process has saved."""

    def make(out: Path) -> None:
        one = Disk(world, out)
        one.save(7)
        one.folder.path.rename(out / "of_one")
        RunFolder(out / "of_one").claim_attempt()
        argv = [sys.executable, "-m", "tests.harness.checkpoints", "two", str(out)]
        done = warm.execute(argv, env=environment())
        assert done.returncode == 0, done.stderr

    out = make_once(tmp_path_factory, "two", make)
    return out, [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


def found(two: tuple[Path, list[dict[str, Any]]], case: str) -> list[Any]:
    assert two[1][0][case]["said"] == two[1][1][case]["said"], "all are told the same"
    return [rank[case]["found"] for rank in two[1]]


def test_two_processes_get_their_parts_back(two: Any) -> None:
    assert found(two, "round_trip") == [{"saved": [True, True], "step": 200, "right": True, "exact": True}] * 2


def test_one_process_takes_what_two_have_saved(two: Any, world: World) -> None:
    said: list[str] = []
    loaded = Checkpointer(RunFolder(two[0] / "round_trip", 2), Ranks(world), Checkpoint(), said.append).load()
    assert loaded is not None and right(loaded, None)
    assert (loaded.step, loaded.processes, loaded.local, loaded.resumes_exactly) == (200, 2, None, False)
    assert (
        said[0].startswith("the checkpoint was saved by 2 ranks and is resumed by 1:")
        and "random states are not" in said[0]
    )


def test_two_processes_take_what_one_has_saved(two: Any) -> None:
    assert found(two, "of_one") == [{"step": 7, "whole": True}] * 2
    assert two[1][0]["of_one"]["said"][0].startswith("the checkpoint was saved by 1 rank and is resumed by 2:")


def test_if_one_cannot_write_none_has_saved_and_all_go_on(two: Any) -> None:
    kept = ["latest", "step-00000001"]
    want = {"failed": [False], "files": kept, "healed": [True], "after": [*kept, "step-00000003"]}
    assert found(two, "one_rank_cannot_write") == [want] * 2
    warning, end = two[1][1]["one_rank_cannot_write"]["said"]
    assert "no checkpoint was saved for step 2: rank 1 on " in warning and os.strerror(errno.EFBIG) in warning
    assert end == "checkpoint saved after step 3; saving works again"
    assert found(two, "rank_0_cannot_begin") == [{"failed": [False]}] * 2


def test_all_take_what_all_can_read(two: Any) -> None:
    """Without agreement the two processes would train on from different steps."""
    both = found(two, "one_rank_sees_less")
    assert [(one["agreed"], one["right"]) for one in both] == [(1, True)] * 2
    assert [one["parted"] for one in both] == [2, 1]
    assert " reports: rank-0.pt is missing" in two[1][0]["one_rank_sees_less"]["said"][0]


def test_a_name_that_two_ranks_give_is_refused(two: Any) -> None:
    for one in found(two, "both_give_a_name"):
        assert "(duplicate names: 1)" in one["error"] and one["files"] == []


def test_sharded_parameters_go_on_and_are_whole_in_the_file(two: Any, world: World) -> None:
    assert found(two, "sharded") == [{"equal": True, "sizes": [4, 4]}, {"equal": True, "sizes": [0, 0]}]
    loaded = Checkpointer(RunFolder(two[0] / "sharded", 2), Ranks(world), Checkpoint(), print).load()
    assert loaded is not None
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    state_dicts.load_tensors(model.named_parameters(), loaded.model)
    assert loaded.optimizer["0.weight"]["exp_avg"].shape == (5, 3)
