"""Table of strategies: what is read from the runs, how runs are combined, and which answers follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder, read_json, write_json
from slurm.reports import strategies
from slurm.reports.strategies import StrategyRun, answer_questions, summarize
from tests.harness.runs.synthetic_runs import SyntheticRun, write_rows

MEASURED = {
    "rank_state_bytes": [5_000_000, 6_000_000],
    "rank_activation_bytes": [4_000_000, 1_000_000],
    "rank_sent_bytes": [100, 300],
    "idle_share": [0.2, 0.4],
}


BASE_RUN = StrategyRun(
    repeat=0,
    ranks=2,
    threads=1,
    host_cores=2,
    step_seconds=[0.1, 0.2, 0.3],
    losses=[2.0, 1.0],
    samples_per_step=10.0,
    tokens_per_sample=0.0,
    state_bytes=3e6,
    activation_bytes=1e6,
    sent_bytes=2e6,
    idle_share=None,
)


def make_run(**changes: Any) -> StrategyRun:
    return dataclasses.replace(BASE_RUN, **changes)


def write_run(folder: Path, **result: Any) -> RunFolder:
    """Write a finished run of twelve steps, whose first steps are slow, with two ranks on one core."""
    run = SyntheticRun(steps=12, result={"measured": MEASURED} | result).write(folder)
    attempt = run.list_attempts()[-1]
    rows = []
    for step in range(1, 13):
        row = {"global_step": step, "samples": 64 * step, "time": step, "loss": 1 / step}
        rows.append(row | ({"step_time": 1.0 if step < 5 else 0.1 + 0.01 * step} if step > 1 else {}))
    rows.append({"global_step": 12, "samples": 768, "time": 20, "test_loss": 1.0})
    write_rows(attempt, rows)
    write_json(attempt.attempt_folder / "world.json", {"processes": 2, "hosts": ["vm"] * 2, "device": "cpu"})
    write_json(run.path / "meta.json", read_json(run.path / "meta.json") | {"machine": {"host": "vm", "cores": 1}})
    return run


def test_the_measurements_of_a_run_are_read_from_its_files(tmp_path: Path) -> None:
    run = strategies.read_run(write_run(tmp_path), repeat=3)
    assert run is not None
    assert (run.repeat, run.ranks, run.host_cores, run.is_oversubscribed) == (3, 2, 1, True)
    assert run.step_seconds == pytest.approx([0.1 + 0.01 * step for step in range(5, 13)])
    assert run.losses == [1 / step for step in range(1, 13)]
    assert run.samples_per_step == 64
    assert (run.state_bytes, run.activation_bytes) == (5e6, 4e6), "rank 0 needs most memory"
    assert run.sent_bytes == 300, "rank 1 sends most"
    assert run.idle_share == pytest.approx(0.3)


def test_an_unfinished_run_has_no_measurements(tmp_path: Path) -> None:
    assert strategies.read_run(write_run(tmp_path, state="failed")) is None


def test_a_run_on_other_hosts_is_not_oversubscribed(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    world = folder.list_attempts()[-1].attempt_folder / "world.json"
    write_json(world, read_json(world) | {"hosts": ["node1", "node2"]})
    run = strategies.read_run(folder)
    assert run is not None
    assert not run.is_oversubscribed


def test_losses_are_compared_with_one_process_in_the_same_round() -> None:
    runs = {
        "one process": [make_run(ranks=1, losses=[2.0, 1.0]), make_run(ranks=1, repeat=1, losses=[3.0, 2.0])],
        "tensor=2": [make_run(losses=[2.0, 1.25]), make_run(repeat=1, losses=[3.5, 2.0])],
        "fsdp=2": [make_run(repeat=2, losses=[9.0])],
    }
    assert [row.loss_difference for row in summarize(runs)] == [0, 0.5, None]


def test_times_are_the_median_and_quartiles_over_all_rounds() -> None:
    runs = {"one process": [make_run(step_seconds=[0.1, 0.2]), make_run(repeat=1, step_seconds=[0.3, 0.4, 0.5])]}
    (row,) = summarize(runs)
    cells = dict(zip(strategies.list_heads(row.runs[0]), row.format_cells(), strict=True))
    assert cells["ms per step"] == "300 [200..400]"
    assert cells["samples/s"] == "33"


ROWS = {
    "one process": [make_run(ranks=1, threads=2, step_seconds=[0.3], state_bytes=8e6, sent_bytes=0)],
    "tensor=2": [make_run(step_seconds=[0.2], state_bytes=4e6, sent_bytes=5e6)],
    "fsdp=2": [make_run(step_seconds=[0.4], state_bytes=3e6, sent_bytes=9e6)],
    "replicas=2": [make_run(step_seconds=[0.25], state_bytes=8e6, sent_bytes=1e6)],
}


def test_the_answers_name_the_best_strategy_for_each_question() -> None:
    assert answer_questions(summarize(ROWS)) == {
        "fastest": "2: tensor=2",
        "least memory per rank": "3: fsdp=2",
        "fewest bytes sent": "4: replicas=2",
    }


def test_without_memory_only_the_fastest_strategy_is_known() -> None:
    rows = ROWS | {"context=2": [make_run(step_seconds=[0.1], state_bytes=None)]}
    assert answer_questions(summarize(rows)) == {"fastest": "5: context=2"}


@pytest.mark.parametrize("columns", ["60", "120", "200"])
def test_the_table_has_a_row_for_each_strategy_and_a_figure(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    crowded = {"tensor=4": [make_run(ranks=4, step_seconds=[0.5, 0.5])]}
    strategies.print_report("gpt", ROWS | crowded, tmp_path)
    out = capsys.readouterr().out
    for label in (*ROWS, "tensor=4"):
        assert label in out
    assert "4 (oversubscribed)" in out
    assert "(oversubscribed): 4 ranks share 2 cores" in out
    assert "threads per rank: 2 with 1 rank, 1 with 2 ranks, 1 with 4 ranks" in out
    assert "in 1 round" in out
    assert "on 2 cores (oversubscribed)" in (tmp_path / "strategies.svg").read_text()
