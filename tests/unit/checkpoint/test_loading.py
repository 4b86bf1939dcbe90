"""Loading checkpoints: damaged, foreign and missing ones are reported, and an older valid one is used instead."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch

from common.checkpoint import loading, rank_file, storage
from common.checkpoint.storage import CheckpointPath, Manifest
from common.system.causes import Cause
from common.system.errors import UserError
from tests.harness.environment.permissions import enforce_permissions
from tests.harness.ranks.checkpoint_cases import equals_saved_state
from tests.unit.checkpoint.conftest import RunWithCheckpoints

FOREIGN_USER = 12345  # neither the current user nor root
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT CHECKED: only root can give files away")


def flip_bit(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def rewrite_manifest(manifest: Path, **changes: Any) -> None:
    """Change a manifest and update its checksum."""
    content = json.loads(manifest.read_text()) | changes
    content.pop("sha256")
    content["sha256"] = storage.hash_manifest(content)
    manifest.write_text(json.dumps(content))


def list_file_outside(manifest: Path) -> None:
    rewrite_manifest(manifest, files={"../../x.pt": {"bytes": 1, "sha256": ""}})


def change_step_in_manifest(manifest: Path) -> None:
    content = manifest.read_text()
    manifest.write_text(content.replace(": 2,", ": 3,"))


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_file(folder: Path) -> None:
    rmtree(folder)
    folder.touch()


def swap_paths(left: Path, right: Path) -> None:
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)


class MakeFolderWhenUnpickled:
    """Object whose pickle executes a function when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def plant_program(file: Path) -> None:
    """Replace the file of rank 0 by one that executes a function when unpickled; update the manifest."""
    torch.save({"model": MakeFolderWhenUnpickled()}, file)
    content = file.read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_manifest(file.with_name("manifest.json"), files={file.name: entry})


Damage = Callable[[Path], object]

DAMAGED_PATHS: dict[str, tuple[str, Damage, str]] = {
    "flipped bit": ("rank-0.pt", lambda file: flip_bit(file, 700), " does not match its checksum"),
    "truncated": ("rank-0.pt", lambda file: os.truncate(file, 999), " has 999 bytes instead of"),
    "empty": ("rank-0.pt", lambda file: os.truncate(file, 0), " has 0 bytes instead of"),
    "no file": ("rank-0.pt", Path.unlink, " is missing"),
    "no manifest": ("manifest.json", Path.unlink, " is missing"),
    "garbage": ("manifest.json", lambda file: file.write_bytes(b"\xff{"), " cannot be read"),
    "deep garbage": ("manifest.json", lambda file: file.write_text("[" * 10**6), " cannot be read"),
    "list": ("manifest.json", lambda file: file.write_text("[1]"), " cannot be read"),
    "changed manifest": ("manifest.json", change_step_in_manifest, " does not match its checksum"),
    "newer format": ("manifest.json", lambda file: rewrite_manifest(file, format=9), " has format 9, but this version"),
    "file outside": ("manifest.json", list_file_outside, " does not list exactly one file for each"),
    "link": ("rank-0.pt", replace_by_link, " is a symbolic link"),
    "linked manifest": ("manifest.json", replace_by_link, " is a symbolic link"),
    "linked folder": ("", replace_by_link, "the checkpoint folder is a symbolic link"),
    "pipe": ("rank-0.pt", replace_by_pipe, " is not a regular file"),
    "file instead of folder": ("", replace_by_file, "the checkpoint folder: Not a directory"),
    "planted program": ("rank-0.pt", plant_program, " is damaged, or contains data other than tensors"),
}


@pytest.mark.parametrize("name, damage, reason", DAMAGED_PATHS.values(), ids=DAMAGED_PATHS)
def test_a_damaged_checkpoint_is_reported_and_the_older_one_is_used(
    run: RunWithCheckpoints, name: str, damage: Damage, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run.save(1, 2)
    damage(run.get_checkpoint(2) / name)
    assert run.load() == 1
    (message,) = run.messages
    assert message.startswith("ignoring checkpoint step-00000002 of attempt 1: ")
    assert f"{name}{reason}" in message
    assert not Path("executed").exists(), "the planted program was executed"


@pytest.mark.parametrize(
    "name, reason",
    [("", "manifest.json belongs to step 1 of attempt 1"), ("rank-0.pt", "rank-0.pt does not match")],
    ids=["folders", "files"],
)
def test_two_swapped_checkpoints_are_refused(run: RunWithCheckpoints, name: str, reason: str) -> None:
    run.save(1, 2)
    swap_paths(run.get_checkpoint(1) / name, run.get_checkpoint(2) / name)
    with pytest.raises(UserError, match=r"no valid checkpoint left \(step-\d+ of .*, step-\d+ of "):
        run.load()
    assert len(run.messages) == 2
    assert run.messages[0].startswith("ignoring checkpoint step-00000002 of attempt 1: ")
    assert reason in run.messages[0]


@needs_root
@pytest.mark.parametrize("name", ["", "rank-0.pt", "manifest.json"])
def test_files_of_another_user_are_refused(run: RunWithCheckpoints, name: str) -> None:
    run.save(1, 2)
    os.chown(run.get_checkpoint(2) / name, FOREIGN_USER, FOREIGN_USER)
    assert run.load() == 1
    assert f"belongs to user ID {FOREIGN_USER}; the current user ID is 0" in run.messages[0]
    os.chown(run.get_checkpoint(1) / name, FOREIGN_USER, FOREIGN_USER)
    with pytest.raises(UserError, match=f"belong to user ID {FOREIGN_USER}: resume the run as that user, or "):
        run.load()


# ---- what checksums and the identity in each file are for


def find_first_weights(file: Path) -> int:
    """Return the position of the first tensor's numbers, where a flipped bit leaves the file readable."""
    step = int(file.parent.name.removeprefix("step-"))
    weights = np.arange(8, dtype=np.float32) + 1000 * step
    return file.read_bytes().index(weights.tobytes())


def test_wrong_weights_would_be_loaded_without_checksums(
    run: RunWithCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_without_checksum(checkpoint: CheckpointPath, _: Manifest, rank: int) -> bytes:
        return storage.read_owned_file(checkpoint, f"rank-{rank}.pt", None)

    run.save(1, 2)
    file = run.get_rank_file(2)
    flip_bit(file, find_first_weights(file))
    monkeypatch.setattr(storage, "read_verified_rank_file", read_without_checksum)
    loaded = run.load_checkpoint()
    assert loaded.step == 2
    assert not equals_saved_state(loaded, 0)
    monkeypatch.undo()
    assert run.load() == 1


def test_a_file_of_another_step_is_refused_even_with_a_valid_checksum(
    run: RunWithCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, 2)
    run.get_rank_file(2).write_bytes(run.get_rank_file(1).read_bytes())
    rewrite_manifest(run.get_manifest(2), files=json.loads(run.get_manifest(1).read_text())["files"])
    assert run.load() == 1
    assert "rank-0.pt belongs to step 1, attempt 1, rank 0 of 1" in run.messages[0]

    # Without the step in the file, the wrong weights would be loaded.
    read_rank_file = rank_file.read_rank_file
    monkeypatch.setattr(loading, "read_rank_file", lambda *arguments: read_rank_file(*arguments) | {"step": 2})
    loaded = run.load_checkpoint()
    assert loaded.step == 2
    assert not equals_saved_state(loaded, 0)


@pytest.mark.parametrize("pointer", ["", "step-99999999\n", "../../..\n", "step-00000001\n", None])
def test_the_file_latest_does_not_affect_loading(run: RunWithCheckpoints, pointer: str | None) -> None:
    run.save(1, 2)
    file = run.get_checkpoint(2).parent / "latest"
    file.unlink()
    if pointer is not None:
        file.write_text(pointer)
    assert run.load() == 2
    file.unlink(missing_ok=True)
    file.symlink_to("nowhere")
    assert run.load() == 2
    assert run.messages == []


# ---- no checkpoint left


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_with_the_remedy(run: RunWithCheckpoints) -> None:
    run.save(1, 2)
    flip_bit(run.get_rank_file(1), 700)
    flip_bit(run.get_rank_file(2), 700)
    with pytest.raises(UserError, match=r"no valid checkpoint left \(step-.*attempts/\*/checkpoints"):
        run.load()
    assert len(run.messages) == 2


def test_a_run_whose_checkpoints_are_all_deleted_is_refused_with_the_remedy(run: RunWithCheckpoints) -> None:
    run.save(1, 2)
    rmtree(run.get_checkpoint(1))
    rmtree(run.get_checkpoint(2))
    message = r"^no valid checkpoint left \(step-00000002 of attempt 1\); .*delete .*attempts/"
    with pytest.raises(UserError, match=message):
        run.load()
    assert run.messages == ["step-00000002 of attempt 1 is missing: the checkpoint folder was deleted"]
    rmtree(run.get_checkpoint(2).parent)
    assert run.load() is None, "the remedy of the message does not work"


@pytest.mark.parametrize("name", ["", "rank-0.pt", "manifest.json"])
def test_unreadable_checkpoints_are_not_to_be_deleted(run: RunWithCheckpoints, name: str) -> None:
    run.save(1, 2)
    (run.get_checkpoint(1) / name).chmod(0)
    (run.get_checkpoint(2) / name).chmod(0)
    with enforce_permissions(), pytest.raises(UserError, match=r"run chmod -R u\+rwX ") as caught:
        run.load()
    assert "Permission denied" in run.messages[0]
    assert "delete" not in str(caught.value)
    assert caught.value.cause is Cause.OTHER

    flip_bit(run.get_manifest(2), 40)  # root can read it
    with enforce_permissions(), pytest.raises(UserError, match=r"run chmod -R u\+rwX "):
        run.load()
    (run.get_checkpoint(1) / name).chmod(0o700)
    with enforce_permissions():
        assert run.load() == 1


def test_a_replaced_checkpoint_is_not_listed_as_missing(run: RunWithCheckpoints) -> None:
    run.save(1, 2)
    run.restart(1, 2)
    run.save(3, 4)
    run.checkpointer.wait_for_deletions()
    rmtree(run.get_checkpoint(3))
    rmtree(run.get_checkpoint(4))
    (missing,) = storage.list_lost_checkpoints(run.folder)
    assert str(missing) == "step-00000004 of attempt 2"


def test_an_incomplete_checkpoint_is_ignored_and_deleted_later(run: RunWithCheckpoints) -> None:
    assert run.load() is None
    assert run.messages == []
    run.save(1)
    checkpoint = run.get_checkpoint(1)
    checkpoint.with_name("latest").unlink()  # would not have been written yet
    checkpoint.rename(checkpoint.with_name(".step-00000001.new"))
    assert run.load() is None
    assert run.messages == ["ignoring 1 incomplete checkpoint; no complete checkpoint exists"]
    run.checkpointer = run.make_checkpointer()
    run.save(2)
    assert run.list_names() == ["latest", "step-00000002"]


def test_checkpoints_of_parent_attempts_are_used_if_there_is_no_newer_one(run: RunWithCheckpoints) -> None:
    run.save(1, 2)
    run.restart(1, 2)
    assert run.load() == 2
    run.save(3)
    rank_file_of_step_3 = run.get_rank_file(3)
    run.restart(2, 3)
    assert run.load() == 3
    rank_file_of_step_3.unlink()
    assert run.load() == 2
    assert run.messages[-1] == "ignoring checkpoint step-00000003 of attempt 2: rank-0.pt is missing"
