"""Each start of a run is an attempt. Metrics follow the chain of attempts from which the run was resumed."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.runs import folder as folder_module
from common.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "mnist_pipeline", "")


def create_attempt(folder: RunFolder, parent: int | None, step: int, steps: range, tail: str = "") -> RunFolder:
    """Create an attempt that resumed from `step` of `parent` and trained `steps`.

    Every second step has an evaluation of two rows. `tail` is the incomplete last line of the metrics.
    """
    attempt = folder.claim_attempt()
    attempt.record_parent_attempt(parent, step)
    rows: list[dict[str, Any]] = []
    for number in steps:
        rows.append({"global_step": number, "loss": number + attempt.number / 10})
        if number % 2 == 0:
            rows += [{"global_step": number, "part": part, "attempt": attempt.number} for part in (1, 2)]
    lines = [json.dumps(row) + "\n" for row in rows]
    attempt.metrics_file.write_text("".join(lines) + tail)
    return attempt


def list_losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.read_metrics() if "loss" in row]


def list_chain(folder: RunFolder) -> list[tuple[int, int | None]]:
    """Return the number of each attempt in the chain, newest first, and its last step that counts."""
    return [(attempt.number, last_step) for attempt, last_step in folder.trace_attempts()]


def test_concurrent_starts_get_different_attempts(folder: RunFolder) -> None:
    barrier = threading.Barrier(8)

    def claim_attempts(_: int) -> list[int]:
        barrier.wait()
        return [folder.claim_attempt().number for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        numbers = list(itertools.chain(*pool.map(claim_attempts, range(8))))
    assert sorted(numbers) == list(range(1, 81))


def test_drafts_of_killed_starts_are_deleted_when_they_are_old(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = [folder.path / "attempts" / name for name in (".new-1234", ".withdrawn-1234")]
    for draft in drafts:
        draft.mkdir(parents=True)
    folder.claim_attempt()
    assert all(draft.exists() for draft in drafts), "another start may be using them"

    monkeypatch.setattr(folder_module, "STALE_DRAFT_SECONDS", -1.0)
    folder.claim_attempt()
    assert not any(draft.exists() for draft in drafts)


def test_metrics_follow_the_chain_without_gaps_or_repeated_steps(folder: RunFolder) -> None:
    create_attempt(folder, None, 0, range(1, 8), tail='{"global_step": 8, "lo')  # saved step 4
    create_attempt(folder, 1, 4, range(5, 10))  # saved steps 6 and 8
    create_attempt(folder, 2, 8, range(9, 12))  # never saved, so it does not count
    create_attempt(folder, 2, 6, range(7, 10))  # the checkpoint of step 8 was damaged
    assert list_chain(folder) == [(4, None), (2, 6), (1, 4)]
    assert list_losses(folder) == [1.1, 2.1, 3.1, 4.1, 5.2, 6.2, 7.4, 8.4, 9.4]

    evaluations = [row for row in folder.read_metrics() if "part" in row]
    assert [row["global_step"] for row in evaluations] == [2, 2, 4, 4, 6, 6, 8, 8]
    assert [row["part"] for row in evaluations] == [1, 2] * 4
    assert [row["attempt"] for row in evaluations] == [1, 1, 1, 1, 2, 2, 4, 4]


def test_rows_that_a_superseded_attempt_writes_later_do_not_count(folder: RunFolder) -> None:
    superseded = create_attempt(folder, None, 0, range(1, 5))
    newest = create_attempt(folder, 1, 2, range(3, 5))
    assert superseded.is_superseded
    assert not newest.is_superseded

    rows_before = folder.read_metrics()
    with open(superseded.metrics_file, "a") as file:  # its host has lost its network and continues
        file.write('{"global_step": 5, "loss": 666}\n')
    assert folder.read_metrics() == rows_before
    assert list_losses(folder) == [1.1, 2.1, 3.2, 4.2]


def test_an_evaluation_after_the_last_saved_step_is_not_repeated(folder: RunFolder) -> None:
    create_attempt(folder, None, 0, range(1, 6))  # saved step 4, before the two rows of its evaluation
    second = create_attempt(folder, 1, 4, range(5, 7))
    second.record_parent_attempt(1, 4, rows=6)
    positions = [(row["global_step"], row.get("part")) for row in folder.read_metrics()]
    assert positions[:6] == [(1, None), (2, None), (2, 1), (2, 2), (3, None), (4, None)]
    assert positions[6:] == [(5, None), (6, None), (6, 1), (6, 2)]


def test_an_attempt_that_ended_before_training_is_skipped(folder: RunFolder) -> None:
    create_attempt(folder, None, 0, range(1, 4))
    folder.claim_attempt()
    assert list_chain(folder) == [(1, None)]
    assert list_losses(folder) == [1.1, 2.1, 3.1]

    create_attempt(folder, 1, 2, range(3, 4))
    assert list_chain(folder) == [(3, None), (1, 2)]
    assert list_losses(folder) == [1.1, 2.1, 3.3]


def test_an_attempt_without_a_parent_counts_alone(folder: RunFolder) -> None:
    create_attempt(folder, None, 0, range(1, 9))
    create_attempt(folder, None, 0, range(1, 3))
    assert list_chain(folder) == [(2, None)]
    assert list_losses(folder) == [1.2, 2.2]


def test_a_run_without_attempts_has_no_metrics(folder: RunFolder) -> None:
    assert folder.trace_attempts() == []
    assert folder.read_metrics() == []


def test_a_single_attempt_that_recorded_no_parent_counts(folder: RunFolder) -> None:
    attempt = create_attempt(folder, None, 0, range(1, 3))
    (attempt.attempt_folder / "attempt.json").unlink()
    folder.claim_attempt()
    assert list_chain(folder) == [(1, None)]
    assert list_losses(folder) == [1.1, 2.1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parent": "1", "step": 2}', '{"parent": 1}', "\x00" * 30])
def test_an_attempt_with_a_damaged_record_of_its_parent_is_skipped(folder: RunFolder, text: str) -> None:
    create_attempt(folder, None, 0, range(1, 4))
    second = create_attempt(folder, 1, 2, range(3, 5))
    (second.attempt_folder / "attempt.json").write_text(text)
    assert list_chain(folder) == [(1, None)]


def test_attempts_whose_parents_form_a_cycle_count_once(folder: RunFolder) -> None:
    create_attempt(folder, 2, 5, range(1, 4))
    create_attempt(folder, 1, 2, range(3, 5))
    assert list_chain(folder) == [(2, None), (1, 2)]


def test_damaged_rows_are_omitted(folder: RunFolder) -> None:
    attempt = create_attempt(folder, None, 0, range(1, 2))
    with open(attempt.metrics_file, "ab") as file:
        file.write(b'\xff\xfe\x00\x00\n12\n{"global_step": 2, {"global_step": 3}\n{"global_step": 4, "loss": 4.0}\n')
    assert list_losses(folder) == [1.1, 4.0]
