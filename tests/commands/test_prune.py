"""make prune-runs: the files that it deletes, and the files that it keeps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.runs.run_lock import try_to_lock
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import execute_verb
from tests.harness.runs.synthetic_runs import SyntheticRun

REMAINING_FILES = {"config.yaml", "meta.json", "metrics.jsonl", "rank-0.log", "attempt.json", "own.py"}


def prune(runs: Path, *arguments: str, status: int = 0) -> Completed:
    return in_process_calls.call_verb("prune-runs", f"--runs-folder={runs}", *arguments, status=status)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished, a failed and a running run, each with a checkpoint, a trace, and W&B folders sent and unsent."""
    place = tmp_path / "runs"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    for number, state in enumerate(("finished", "failed", "running")):
        folder = SyntheticRun("ddp_multinode", number, 20, state=state).write(place)
        attempt_folder = folder.list_attempts()[0].attempt_folder
        checkpoint = attempt_folder / "checkpoints/step-00000010"
        checkpoint.mkdir(parents=True)
        (checkpoint / "rank-0.pt").write_bytes(bytes(3_000_000))
        (checkpoint.parent / "latest").symlink_to(outside)
        (attempt_folder / "trace-0.json").write_text("{}")
        (folder.path / "model.safetensors").write_text("x")
        (folder.path / "code").mkdir()
        (folder.path / "code/own.py").write_text("x")
        for name in ("sent", "unsent"):
            start = folder.path / "wandb" / f"offline-run-{name}"
            start.mkdir(parents=True)
            (start / f"run-{name}.wandb").write_text("x")
        (folder.path / "wandb/offline-run-sent/run-sent.wandb.synced").touch()
    return place


def test_nothing_is_deleted_by_default(runs: Path) -> None:
    before = files(runs)
    completed = execute_verb("prune-runs", f"--runs-folder={runs}", status=0)
    command = f"python -m slurm prune-runs --runs-folder={runs} --delete=1"
    assert f"3.0 MB would be freed; to delete the files: {command}" in completed.stdout
    assert files(runs) == before


@pytest.mark.parametrize("option", ["--runs=", "--name=", "--last=", "--where= ", "--pick="])
def test_an_empty_selection_deletes_nothing(runs: Path, option: str) -> None:
    before = files(runs)
    name = option.strip("-= ").upper()
    error = prune(runs, option, "--delete=1", status=2).stderr
    assert f"error: {name} is empty; omit" in error.replace("--pick", "PICK")
    assert files(runs) == before


def test_only_superfluous_files_are_deleted(runs: Path, tmp_path: Path) -> None:
    finished, failed, running = sorted(runs.iterdir())
    before = files(failed)
    completed = prune(runs, "--delete=1")
    assert "3.0 MB freed" in completed.stdout
    assert files(finished) >= REMAINING_FILES | {"result.json", "run-unsent.wandb"}
    assert not files(finished) & {"rank-0.pt", "trace-0.json", "run-sent.wandb"}
    assert files(failed) == before, "a failed run needs its checkpoint to be resumed"
    assert "rank-0.pt" in files(running)
    assert (tmp_path / "outside/precious").exists()

    completed = prune(runs, f"--runs={failed.name} {running.name}", "--delete=1")
    assert f"skipped {running.name}: the run has not ended yet (RUNNING)\n" in completed.stdout
    assert "rank-0.pt" not in files(failed)
    assert files(failed) >= REMAINING_FILES | {"run-unsent.wandb"}
    assert "rank-0.pt" in files(running)
    assert "0.0 MB would be freed" in prune(runs).stdout
    arguments = ("prune-runs", f"--runs={failed.name}", "--last=2")
    preview = in_process_calls.call_verb(*arguments, cwd=tmp_path).stdout
    assert f"make prune-runs RUNS={failed.name} LAST=2 DELETE=1" in preview


def test_the_only_model_of_a_run_is_deleted_only_if_the_run_is_named(runs: Path) -> None:
    finished = min(runs.iterdir())
    (finished / "model.safetensors").unlink()
    older = finished / "attempts/0001/checkpoints/step-00000005"
    shutil.copytree(older.with_name("step-00000010"), older)
    prune(runs, "--delete=1")
    assert not older.exists()
    assert (older.with_name("step-00000010") / "rank-0.pt").exists()
    prune(runs, f"--runs={finished.name}", "--delete=1")
    assert "rank-0.pt" not in files(finished)


def test_an_invalid_switch_deletes_nothing(runs: Path) -> None:
    before = files(runs)
    for arguments, message in (
        (("--dry-run=no",), "DRY_RUN must be 0 or 1"),
        (("--delete=yes",), "DELETE must be 0 or 1"),
        (("--delete=1", "--dry-run=1"), "DELETE=1 and DRY_RUN=1 contradict each other; omit one of them"),
    ):
        completed = prune(runs, *arguments, status=2)
        assert message in completed.stderr
    assert "would be freed" in prune(runs, "--dry-run=1").stdout
    assert files(runs) == before


def test_the_switch_of_older_versions_deletes_with_a_notice(runs: Path) -> None:
    completed = prune(runs, "--dry-run=0")
    assert "3.0 MB freed" in completed.stdout
    assert completed.stderr == "note: DRY_RUN=0 is deprecated; use DELETE=1\n"


def test_the_best_model_is_deleted_only_if_its_run_is_named(runs: Path) -> None:
    finished = sorted(runs.iterdir())[0]
    (saved,) = finished.glob("attempts/*/checkpoints")
    (saved / "step-00000005").mkdir()
    (saved / "step-00000005/rank-0.pt").write_bytes(bytes(1000))
    (saved / "best").write_text("step-00000005\n")
    completed = prune(runs, "--delete=1")
    assert sorted(path.name for path in saved.iterdir()) == ["best", "step-00000005"]
    completed = prune(runs, f"--runs={finished.name}", "--delete=1")
    assert not saved.exists(), completed.stderr


def test_a_run_that_another_command_uses_is_skipped(runs: Path) -> None:
    """The command may resume the finished run, or delete its files."""
    finished = min(runs.iterdir())
    before = files(finished)
    lock = try_to_lock(RunFolder(finished))
    assert lock is not None
    with lock:
        for arguments in ([], ["--delete=1"], [f"--runs={finished.name}", "--delete=1"]):
            completed = prune(runs, *arguments)
            assert f"skipped {finished.name}: another command uses the run\n" in completed.stdout
    assert files(finished) == before
    prune(runs, "--delete=1")
    assert "rank-0.pt" not in files(finished)
