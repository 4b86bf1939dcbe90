"""Attempts: each start has its own, and the run is read along the chain of those that count."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from common.runs import folder as folder_module
from common.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "mnist_pipeline", "")


def begin(folder: RunFolder, parent: int | None, step: int, steps: range, tail: str = "") -> RunFolder:
    """A start that trained `steps`, with an evaluation of two rows after every second one."""
    attempt = folder.claim_attempt()
    attempt.record_parent_attempt(parent, step)
    rows: list[dict[str, Any]] = []
    for number in steps:
        rows.append({"global_step": number, "loss": number + attempt.number / 10})
        if number % 2 == 0:
            rows += [{"global_step": number, "part": part, "by": attempt.number} for part in (1, 2)]
    attempt.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return attempt


def losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.read_metrics() if "loss" in row]


def chain(folder: RunFolder) -> list[tuple[int, int | None]]:
    return [(attempt.number, bound) for attempt, bound in folder.trace_attempts()]


def test_two_starts_at_once_get_an_attempt_each(folder: RunFolder) -> None:
    gate, claimed = threading.Barrier(8), []

    def claim() -> None:
        gate.wait()
        for _ in range(10):
            claimed.append(folder.claim_attempt().number)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 81))


def test_what_a_killed_start_left_is_removed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [folder.path / "attempts" / name for name in (".new-1234", ".withdrawn-1234")]
    for path in left:
        path.mkdir(parents=True)
    folder.claim_attempt()
    assert all(path.exists() for path in left), "another start may be at work there"
    monkeypatch.setattr(folder_module, "STALE_DRAFT_SECONDS", -1.0)
    folder.claim_attempt()
    assert not any(path.exists() for path in left)


def test_metrics_follow_the_chain_without_gap_or_repeat(folder: RunFolder) -> None:
    begin(folder, None, 0, range(1, 8), tail='{"global_step": 8, "lo')  # saved at 4, cut off in the row of 8
    begin(folder, 1, 4, range(5, 10))  # saved at 6 and 8
    begin(folder, 2, 8, range(9, 12))  # never saved: cut off
    begin(folder, 2, 6, range(7, 10))  # the one of 8 was damaged
    assert chain(folder) == [(4, None), (2, 6), (1, 4)]
    assert losses(folder) == [1.1, 2.1, 3.1, 4.1, 5.2, 6.2, 7.4, 8.4, 9.4]
    evaluations = [(row["global_step"], row["part"], row["by"]) for row in folder.read_metrics() if "part" in row]
    assert evaluations == [(s, p, by) for s, by in ((2, 1), (4, 1), (6, 2), (8, 4)) for p in (1, 2)]


def test_rows_of_a_start_that_was_cut_off_do_not_count(folder: RunFolder) -> None:
    old = begin(folder, None, 0, range(1, 5))
    new = begin(folder, 1, 2, range(3, 5))
    assert old.is_superseded and not new.is_superseded
    before = folder.read_metrics()
    with open(old.metrics_file, "a") as file:  # it lives on behind a cut cable
        file.write('{"global_step": 5, "loss": 666}\n')
    assert folder.read_metrics() == before and losses(folder) == [1.1, 2.1, 3.2, 4.2]


def test_an_evaluation_after_the_last_step_saved_comes_once(folder: RunFolder) -> None:
    begin(folder, None, 0, range(1, 6))  # saved at 4, before the first of the two rows of its evaluation
    second = begin(folder, 1, 4, range(5, 7))
    second.record_parent_attempt(1, 4, rows=6)
    assert [(row["global_step"], row.get("part")) for row in folder.read_metrics()] == [
        *((1, None), (2, None), (2, 1), (2, 2), (3, None), (4, None)),
        *((5, None), (6, None), (6, 1), (6, 2)),
    ]


def test_a_start_that_did_not_come_to_training_is_skipped(folder: RunFolder) -> None:
    begin(folder, None, 0, range(1, 4))
    folder.claim_attempt()
    assert chain(folder) == [(1, None)] and losses(folder) == [1.1, 2.1, 3.1]
    begin(folder, 1, 2, range(3, 4))
    assert chain(folder) == [(3, None), (1, 2)] and losses(folder) == [1.1, 2.1, 3.3]


def test_a_fresh_start_counts_alone(folder: RunFolder) -> None:
    begin(folder, None, 0, range(1, 9))
    begin(folder, None, 0, range(1, 3))
    assert chain(folder) == [(2, None)] and losses(folder) == [1.2, 2.2]


def test_a_lone_start_that_noted_nothing_is_read(folder: RunFolder) -> None:
    assert folder.trace_attempts() == [] and folder.read_metrics() == []
    attempt = begin(folder, None, 0, range(1, 3))
    (attempt.attempt_folder / "attempt.json").unlink()
    folder.claim_attempt()
    assert chain(folder) == [(1, None)] and losses(folder) == [1.1, 2.1]


@pytest.mark.parametrize("note", ["", "{", "[]", '{"parent": "1", "step": 2}', '{"parent": 1}', "\x00" * 30])
def test_a_damaged_note_counts_as_none(folder: RunFolder, note: str) -> None:
    begin(folder, None, 0, range(1, 4))
    (begin(folder, 1, 2, range(3, 5)).attempt_folder / "attempt.json").write_text(note)
    assert chain(folder) == [(1, None)]


def test_no_note_leads_in_a_circle(folder: RunFolder) -> None:
    begin(folder, 2, 5, range(1, 4))
    begin(folder, 1, 2, range(3, 5))
    assert chain(folder) == [(2, None), (1, 2)]


def test_damaged_rows_are_left_out(folder: RunFolder) -> None:
    attempt = begin(folder, None, 0, range(1, 2))
    with open(attempt.metrics_file, "ab") as file:
        file.write(b'\xff\xfe\x00\x00\n12\n{"global_step": 2, {"global_step": 3}\n{"global_step": 4, "loss": 4.0}\n')
    assert losses(folder) == [1.1, 4.0]
